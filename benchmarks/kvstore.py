"""The KV store, piece by piece, each beside its limit or a peer in the same run.

    python -m benchmarks.kvstore chat                         # later turns of conversations, with the store and without
    python -m benchmarks.kvstore disk [--folder /var/tmp]     # the disk tier's file beside fio
    python -m benchmarks.kvstore fetch                        # fetches beside transfers, and beside computing
    python -m benchmarks.kvstore host                         # copies to and from the host tier beside memcpy
    python -m benchmarks.kvstore index                        # what routers know of nodes: look-ups, changes, memory
    python -m benchmarks.kvstore mooncake --python PYTHON     # gets over tcp beside Mooncake Store's
    python -m benchmarks.kvstore replay --trace FILE          # hit rates of a trace, in mock time
    python -m benchmarks.kvstore unused                       # with the store over without, where nothing is reused

Each prints a table with ratios and says which bar it misses; `--json` keeps the samples. A part is a module of its own,
`benchmarks.kvstore_NAME`, with `add_arguments(parser)` and `run(options)`.
"""

from __future__ import annotations

import argparse
import importlib

PARTS = ("chat", "disk", "fetch", "host", "index", "mooncake", "replay", "unused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    modules = {name: importlib.import_module(f"benchmarks.kvstore_{name}") for name in PARTS}
    for name, module in modules.items():
        module.add_arguments(parts.add_parser(name, help=(module.__doc__ or name).splitlines()[0]))
    options = parser.parse_args()
    modules[options.part].run(options)


if __name__ == "__main__":
    main()
