"""`make soak`: MINUTES of it, then a table as JSON. Fails where one of the streams noticed, or something has grown."""

from __future__ import annotations

import argparse
import json

from tests.soak.run import soak

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    _, soaked = soak(seconds=60 * given.minutes, seed=given.seed)
    print(json.dumps(soaked.table(), indent=2))
    soaked.check()
