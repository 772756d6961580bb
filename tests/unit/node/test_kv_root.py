"""Which nodes share cached KV: those whose KV is made by the same thing."""

from __future__ import annotations

from dataclasses import replace

from engine.build import BuiltEngine, EngineConfig, EngineKind, build_runner
from node.pool import root_of


def built(**changes: object) -> BuiltEngine:
    config = EngineConfig(kind=EngineKind.MOCK)
    return replace(build_runner(config), **changes)  # type: ignore[arg-type]


def test_a_node_of_rounded_weights_shares_no_kv_with_one_of_full_precision() -> None:
    """One checkpoint and one layout, on one node with weights of 8 bits: what that one's weights made is not the
    other's KV. Two nodes that are alike share."""
    plain, rounded = built(), built(quantisation="int8")
    layout = plain.runner.layout
    assert rounded.runner.layout == layout
    assert root_of(plain, layout) == root_of(built(), layout)
    assert root_of(plain, layout) != root_of(rounded, layout)


def test_another_checkpoint_or_layout_is_other_kv() -> None:
    """Neither a fine-tuned model of one shape nor one model in blocks of another size shares."""
    plain = built()
    layout = plain.runner.layout
    assert root_of(plain, layout) != root_of(built(fingerprint="tuned"), layout)
    assert root_of(plain, layout) != root_of(plain, replace(layout, block_size=layout.block_size * 2))
    assert root_of(plain, layout) != root_of(plain, replace(layout, dtype="float64"))
