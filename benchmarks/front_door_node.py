"""A Baton process for benchmarks/front_door.py: the service that the command line names, whose engine is timed.

    python benchmarks/front_door_node.py decode --engine-kind mock ...

The threads that compute are named, so that the processor time of the others can be told apart. The mock engine draws
tokens at a pace: a step for each `prompt[0]` / RATE_ENV seconds, so with as many streams as the first token id of each
prompt says there are RATE_ENV tokens a second. A token is the time at which it was drawn, see `stamp`.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

# The tree that is measured may be another one, with benchmarks of its own.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.front_door_cpu import ENGINE, name_own_thread
from benchmarks.front_door_tokens import VOCABULARY, first_step_s, stamp

sys.path.pop(0)

RATE_ENV: Final = "BATON_FRONT_DOOR_RATE"
NODES_ENV: Final = "BATON_FRONT_DOOR_NODES"
"""Decode nodes, whose steps are not to fall together."""


def paced(runner: type[Any], result: type[Any]) -> type[Any]:
    """A mock engine that computes nothing: `engine.mock.MockRunner` gives all but its steps."""
    # Named decode-0, decode-1 and so on.
    share = int(sys.argv[sys.argv.index("--name") + 1].rpartition("-")[2]) / int(os.environ[NODES_ENV])

    class PacedRunner(runner):  # type: ignore[misc]
        named = False
        due_s = 0.0

        def run(self, batch: Any, sink: Any) -> Any:
            if not self.named:
                name_own_thread(ENGINE)
                self.named = True
            decoding = [piece for piece in batch.slices if piece.output_index]
            if decoding:
                step_s = max(piece.tokens[0] for piece in decoding) / float(os.environ[RATE_ENV])
                if self.due_s < time.monotonic() - step_s:  # nobody has decoded since
                    self.due_s = first_step_s(time.monotonic(), step_s, share)
                time.sleep(max(0.0, self.due_s - time.monotonic()))
                self.due_s = max(time.monotonic(), self.due_s + step_s)
            for layer in range(self.config.num_layers):
                sink.layer_done(layer)
            drawn = stamp(time.monotonic())
            return result(sampled={piece.key: drawn for piece in batch.slices if piece.sample})

    return PacedRunner


def main() -> None:
    import engine.build
    from engine.mock import MockConfig, MockRunner
    from engine.types import StepResult

    changed: Any = engine.build
    if "mock" in sys.argv:
        changed.MockRunner = paced(MockRunner, StepResult)
        changed.MockConfig = partial(MockConfig, vocab_size=VOCABULARY, num_layers=1)
    else:
        from engine.runner import TorchRunner

        run = TorchRunner.run
        changed = TorchRunner

        def named(self: Any, *args: Any) -> Any:
            name_own_thread(ENGINE)
            changed.run = run
            return run(self, *args)

        changed.run = named
    from cli.main import main as baton

    baton()


if __name__ == "__main__":
    main()
