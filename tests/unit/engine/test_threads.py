"""How many threads a torch operation uses."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from engine.build import EngineConfig, build_runner
from engine.demo_model import DemoModelParams, write_demo_model


def test_the_thread_count_holds_in_threads_started_later(tmp_path: Path) -> None:
    """The engine thread, started after the model was loaded, uses as many threads as configured."""
    write_demo_model(tmp_path / "model", DemoModelParams(num_layers=1))
    before = torch.get_num_threads()
    try:
        build_runner(EngineConfig(model=str(tmp_path / "model"), compute_threads=before + 1))
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join(timeout=60)
        assert seen == [before + 1]
    finally:
        torch.set_num_threads(before)
