"""Run fault cases: `python -m tests.faults [--list] [--real] [--seed N] [--part K/N] [--case NAME]...`.

Prints a table; exits with 1 where something is lost, wrong or leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import os
import random
import sys
import tempfile
from typing import Final

from tests.faults.groups import GROUPS
from tests.faults.outcome import Outcome, head, line, row, total

RECOVER_S_MAX: Final = 2.0
"""To the next token after a decode node was killed, on an idle machine. Told, and no failure: others may be at work."""


def _part(text: str) -> tuple[int, int]:
    """ "1/2": every second case, from the first one on."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part like 1/2")
    return int(number), int(of)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument(
        "--case", action="append", metavar="NAME", default=[], help="only this one, or those like it: 'kill-decode-*'"
    )
    parser.add_argument("--real", action="store_true", help="only the sample on the real engine")
    parser.add_argument(
        "--seed", type=int, default=0, help="other than 0: other prompts, and the cases of a cluster in another order"
    )
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="K/N", help="only the K-th, (K+N)-th, ... case of each cluster"
    )
    arguments = parser.parse_args()
    wanted = [*arguments.case, *(["real-*"] if arguments.real else [])] or ["*"]
    chosen = {
        group: [case for case in group.cases if any(fnmatch.fnmatch(case.name, pattern) for pattern in wanted)]
        for group in GROUPS
    }
    first, step = arguments.part
    chosen = {group: cases[first - 1 :: step] for group, cases in chosen.items()}
    if arguments.seed:
        rng = random.Random(arguments.seed)
        for cases in chosen.values():
            rng.shuffle(cases)
    if not any(chosen.values()):
        parser.error(f"no such case: {', '.join(wanted)}; --list names them")
    if arguments.list:
        print("\n".join(case.name for cases in chosen.values() for case in cases))
        return 0
    print(head(), flush=True)
    outcomes: list[Outcome] = []

    def show(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(line(row(outcome)), flush=True)
        for problem in outcome.problems:
            print(f"{outcome.case}: {problem}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state  # nodes make the operator's token there, and not at home
        for group, cases in chosen.items():
            if cases:
                asyncio.run(group.run(cases, show, seed=arguments.seed))
    print(total(outcomes))
    slow = [o.case for o in outcomes if o.case.startswith("kill-decode-") and o.recover_s >= RECOVER_S_MAX]
    if slow:
        print(f"Slower than {RECOVER_S_MAX:g} s, which an idle machine is not: {', '.join(slow)}", file=sys.stderr)
    bad = [outcome.case for outcome in outcomes if outcome.bad]
    if bad:
        again = f"--seed {arguments.seed} --case {bad[0]}" if arguments.seed else f"--case {bad[0]}"
        print(f"FAILED: {', '.join(bad)}. Again: python -m tests.faults {again}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
