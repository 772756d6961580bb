"""What the mock model answers, by its definition alone."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from engine import mock
from engine.mock import MockConfig
from engine.types import SamplingParams


def mock_reference(
    prompt: Sequence[int], params: SamplingParams, n: int, *, config: MockConfig, output: Sequence[int] = ()
) -> list[int]:
    """The `n` output tokens that follow `prompt` and `output`, by the definition alone: no region, blocks or batches.

    Stop rules are not applied.
    """
    slots = [mock._root(config, layer) for layer in range(config.num_layers)]
    contexts = [blake2b() for _ in range(config.num_layers)]
    tokens: list[int] = []
    for position, known in enumerate([*prompt, *output, *[None] * n]):
        if known is None:
            index = position - len(prompt)
            digests = b"".join(context.digest() for context in contexts)
            tokens.append(mock._draw(b"".join(slots), digests, params, index, config))
        token = tokens[-1] if known is None else known
        for layer, context in enumerate(contexts):
            slots[layer] = mock._next_slot(slots[layer], token, layer)
            context.update(slots[layer])
    return tokens
