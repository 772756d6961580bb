"""What the directory says of nodes, for routers that are tested alone."""

from __future__ import annotations

from baton.wire import ModelInfo

MODEL = ModelInfo(
    name="m", fingerprint="f", vocab_size=1000, context_len_max=100, eos_token_ids=(0,), layout_hash="l",
    block_size=16, protocol_min=1, protocol_max=1,
)  # fmt: skip
