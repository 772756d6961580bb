"""Real processes under faults: `python -m tests.faults`, which is `make faults`.

Each case starts streamed requests on a cluster of processes, strikes one process or link at an exact point of one
request's life, and then asks four things: has every client its whole answer (lost), is it the right one (wrong), is
every block free again (leaked), how long did the request that was hit go without a token.

The product has no hooks. Nodes are started by `tests.faults.node`, which wraps named methods of theirs.
"""
