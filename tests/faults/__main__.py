"""Run fault cases: `python -m tests.faults [--list] [--real] [--case NAME]...`.

Prints a table; exits with 1 where something is lost, wrong or leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import sys
from typing import Final

from tests.faults.groups import GROUPS
from tests.faults.outcome import Outcome, head, line, row, total

RECOVER_S_MAX: Final = 2.0
"""To the next token after a decode node was killed, on an idle machine. Told, and no failure: others may be at work."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument(
        "--case", action="append", metavar="NAME", default=[], help="only this one, or those like it: 'kill-decode-*'"
    )
    parser.add_argument("--real", action="store_true", help="only the sample on the real engine")
    arguments = parser.parse_args()
    wanted = [*arguments.case, *(["real-*"] if arguments.real else [])] or ["*"]
    chosen = {
        group: [case for case in group.cases if any(fnmatch.fnmatch(case.name, pattern) for pattern in wanted)]
        for group in GROUPS
    }
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

    for group, cases in chosen.items():
        if cases:
            asyncio.run(group.run(cases, show))
    print(total(outcomes))
    slow = [o.case for o in outcomes if o.case.startswith("kill-decode-") and o.recover_s >= RECOVER_S_MAX]
    if slow:
        print(f"Slower than {RECOVER_S_MAX:g} s, which an idle machine is not: {', '.join(slow)}", file=sys.stderr)
    bad = [outcome.case for outcome in outcomes if outcome.bad]
    if bad:
        print(f"FAILED: {', '.join(bad)}. Again: python -m tests.faults --case {bad[0]}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
