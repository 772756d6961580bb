"""`make fuzz`: every target in turn with inputs that nobody has seen, until the time is over. What fails is kept in
`tests/fuzz/seeds`, where the quick tests find it."""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import secrets
import sys
import time
import traceback
from typing import Final

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.growth import SMALL_BYTES, too_costly
from tests.fuzz.target import SEEDS, Target
from tests.fuzz.targets import TARGETS

EXAMPLES: Final = 500
"""Of one target before the next one's turn."""
REPEATS: Final = 5
FAILURES_MAX: Final = 5
"""Of one target: it has no further turn."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="how long; 15 unless told")
    parser.add_argument("--seed", type=int, default=None, help="begin with this one, to repeat a run")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="this one only; may be repeated")
    asked = parser.parse_args()
    number = secrets.randbits(32) if asked.seed is None else asked.seed
    logging.getLogger().addHandler(logging.NullHandler())  # what parsers say of bad input is not ours
    until_s = time.monotonic() + 60 * asked.minutes
    failures, tried = dict.fromkeys(asked.target or TARGETS, 0), 0
    while time.monotonic() < until_s and (left := [name for name, count in failures.items() if count < FAILURES_MAX]):
        for name in left:
            tried += EXAMPLES
            failures[name] += not _turn(TARGETS[name], number)
            if time.monotonic() >= until_s:
                break
        number += 1
    found = sum(failures.values())
    print(f"{tried} inputs, {found} failures, last seed {number}, {time.process_time():.0f} s of processor time")
    return min(found, 1)


def _turn(target: Target, number: int) -> bool:
    """Whether all went well."""
    last = [b""]

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.target, Phase.shrink],
    )
    @given(target.examples())
    def fuzz(data: bytes) -> None:
        last[0] = data
        target.check(data)

    try:
        fuzz()
    except Exception:
        traceback.print_exc()
        _keep(target, last[0], number)
        return False
    return _grows_well(target, number)


def _grows_well(target: Target, number: int) -> bool:
    """Parts of inputs, repeated: at random from the good ones, and those that are known to be worth a look."""
    rng = random.Random(number)
    for _ in range(REPEATS):
        begin, part, end = rng.choice([*target.repeats, *(_cut(rng, data) for data in target.samples)])
        try:
            why = too_costly(target, begin, part, end)
        except Exception:
            traceback.print_exc()
            why = "it fails"
        if why is not None:
            print(f"{target.name}: {begin[:60]!r} + n * {part[:60]!r} + {end[:60]!r}: {why}", file=sys.stderr)
            _keep(target, begin + part * (SMALL_BYTES // len(part)) + end, number)
            return False
    return True


def _cut(rng: random.Random, data: bytes) -> tuple[bytes, bytes, bytes]:
    low = rng.randrange(len(data))
    high = min(len(data), low + rng.randint(1, 20))
    return data[:low], data[low:high], data[high:]


def _keep(target: Target, data: bytes, number: int) -> None:
    path = SEEDS / target.name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    print(f"{target.name}, seed {number}: kept in {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
