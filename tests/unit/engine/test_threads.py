"""How many threads a torch operation uses."""

from __future__ import annotations

import threading

import torch

from engine.runner import configure_threads


def test_the_thread_count_holds_in_threads_started_later() -> None:
    """The engine thread, started after the setting was made, uses that many threads."""
    before = torch.get_num_threads()
    try:
        configure_threads(before + 1)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join(timeout=60)
        assert seen == [before + 1]
    finally:
        configure_threads(before)
