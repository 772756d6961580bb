"""A model that answers by heart: the last token of the prompt decides the answer, and each token the next one.

Layers add nothing, so the output is the last token's embedding; the row of each token of an answer is the embedding of
the one before it. A token can have one successor only: answers are cut into pieces that occur once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from engine.demo_model import EOS_ID, DemoModelParams, write_demo_model
from engine.model_config import EMBEDDING, LM_HEAD

SCORE: Final = 20.0
"""Of the right token; all others are far below."""
PIECE_CHARS: Final = 5
_HIDDEN: Final = 256


def write_scripted_model(
    folder: Path, answers: Mapping[str, str], *, template: str, special: Sequence[str] = (), max_len: int = 2048
) -> None:
    """`answers` by the text that ends the prompt, in ASCII. Texts in `special` are special tokens."""
    write_demo_model(
        folder,
        DemoModelParams(
            num_layers=2, hidden_size=_HIDDEN, num_heads=4, head_dim=16, vocab_size=600, context_len_max=max_len
        ),
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chains = _cut(answers, special)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = [*answers, *(piece for pieces in chains.values() for piece in pieces if piece not in special)]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    tensors = load_file(folder / "model.safetensors")
    embedding = np.random.default_rng(1).standard_normal((size, _HIDDEN), dtype=np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    rows = np.zeros_like(embedding)
    for word, pieces in chains.items():
        ids = [tokenizer.token_to_id(text) for text in (word, *pieces)]
        for before, token in zip(ids, [*ids[1:], EOS_ID], strict=True):
            rows[token] += embedding[before] * SCORE
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][:] = 0
        elif tensors[name].ndim == 1:
            tensors[name][:] = 1
    save_file({**tensors, EMBEDDING: embedding, LM_HEAD: rows}, folder / "model.safetensors", metadata={"format": "pt"})
    _change(folder / "config.json", vocab_size=size)
    _change(folder / "tokenizer_config.json", chat_template=template)


def _cut(answers: Mapping[str, str], special: Sequence[str]) -> dict[str, list[str]]:
    """Each answer in pieces, of which no two are equal."""
    used: set[str] = set()
    chains: dict[str, list[str]] = {}
    for word, text in answers.items():
        pieces, at = chains.setdefault(word, []), 0
        while at < len(text):
            piece = next((mark for mark in special if text.startswith(mark, at)), "")
            if not piece:
                end = min([text.find(mark, at) for mark in special if mark in text[at:]], default=len(text))
                size = PIECE_CHARS
                while text[at : at + size] in used and at + size < end:
                    size += 1
                piece = text[at : min(at + size, end)]
                while piece in used and pieces and pieces[-1] not in special:
                    at -= len(pieces[-1])
                    used.remove(pieces[-1])
                    piece = pieces.pop() + piece
            assert piece not in used, piece
            used.add(piece)
            pieces.append(piece)
            at += len(piece)
    return chains


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
