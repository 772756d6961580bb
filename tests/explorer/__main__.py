"""Run explorations: `python -m tests.explorer [--large] [NAME ...]`. Prints the states; exits with 1 on a violation."""

from __future__ import annotations

import argparse
import sys

from tests.explorer.calm import walk_all
from tests.explorer.runs import DEFAULT, LARGE
from tests.explorer.search import Counterexample, explore


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__)
    parser.add_argument("--large", action="store_true", help="the larger bounds too: many minutes, several GiB")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join(LARGE)}")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - LARGE.keys()
    if unknown:
        parser.error(f"no such exploration: {', '.join(sorted(unknown))}")
    for name in arguments.names or (LARGE if arguments.large else DEFAULT):
        try:
            found = explore(LARGE[name])
            calm = walk_all(found)
        except Counterexample as counterexample:
            print(f"{name}: {counterexample}")
            return 1
        print(f"{name}: {found.summary()}; {calm.summary()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
