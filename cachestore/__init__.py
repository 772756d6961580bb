"""The books of a node's KV: which blocks there are, who owns each, and what is cached where. Pure, below the engine and
the transfer."""
