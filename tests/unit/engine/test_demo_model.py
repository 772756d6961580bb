"""The demo model: loadable by transformers and by the engine, reproducible, and careful with what is there already."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.demo_model import EOS_ID, EOS_TOKEN, MARKER_FILE, DemoModelError, DemoModelParams, write_demo_model
from engine.model_config import ConfigFileError, ModelFamily
from engine.runner import TorchRunner
from engine.types import Batch, NullSink, SamplingParams, SequenceSlice

SMALL = DemoModelParams(num_layers=1, hidden_size=16, intermediate_size=24, num_heads=2, head_dim=8, vocab_size=300)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", list(ModelFamily))
@pytest.mark.parametrize("tied", [False, True])
def test_the_default_model_is_a_worthy_test_subject(tmp_path: Path, family: ModelFamily, tied: bool) -> None:
    """transformers loads model and tokenizer; greedy text is varied, far from ties, and equal to the engine's."""
    folder = tmp_path / "demo"
    write_demo_model(folder, DemoModelParams(family=family, tie_word_embeddings=tied))
    auto_model: Any = transformers.AutoModelForCausalLM
    model = auto_model.from_pretrained(folder).eval()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Hello! Where does the road lead?", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True)
    answer = out.sequences[0, ids.shape[1] :].tolist()
    best_two = torch.cat(out.logits).topk(2).values
    assert len(set(answer)) > 12
    assert (best_two[:, 0] - best_two[:, 1]).min() > 1e-3
    assert tokenizer.decode(answer).isprintable()
    assert greedy(TorchRunner.load(folder, block_size=16), ids[0].tolist(), 24) == answer


def greedy(runner: TorchRunner, tokens: list[int], max_new: int) -> list[int]:
    spec, num_blocks = runner.kv_spec, 4
    record_bytes = 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * 4
    runner.bind(torch.zeros(spec.num_layers * num_blocks * record_bytes, dtype=torch.uint8).numpy(), num_blocks)
    key = RequestKey(request=RequestId("r"), attempt=Attempt(0))
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=max_new)
    tokens, start, num_prompt = list(tokens), 0, len(tokens)
    for index in range(max_new):
        part = SequenceSlice(
            key=key,
            tokens=tokens,
            start=start,
            stop=len(tokens),
            block_table=[BlockId(b) for b in (2, 0, 3, 1)],
            sample=True,
            output_index=index,
            params=params,
        )
        start = len(tokens)
        tokens = [*tokens, runner.run(Batch(slices=(part,)), NullSink()).sampled[key]]
    return tokens[num_prompt:]


def test_the_tokenizer_returns_any_text(tmp_path: Path) -> None:
    """Text in any script survives encoding and decoding; nothing is added; the vocabulary fills the model's."""
    write_demo_model(tmp_path / "demo", SMALL)
    tokenizer = Tokenizer.from_file(str(tmp_path / "demo" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id(EOS_TOKEN) == EOS_ID
    for text in ("the runner carries", "  Zebra — ünïcode 漢字 🎽\n\tx", ""):
        encoded = tokenizer.encode(text).ids
        assert tokenizer.decode(encoded) == text
        assert EOS_ID not in encoded


def test_a_vocabulary_larger_than_the_text_is_filled_up(tmp_path: Path) -> None:
    """Training runs out of words: reserved tokens make tokenizer and model agree in size."""
    write_demo_model(tmp_path / "demo", replace(SMALL, vocab_size=5000))
    tokenizer = Tokenizer.from_file(str(tmp_path / "demo" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 5000
    assert "<|reserved_0|>" in tokenizer.get_vocab()


def test_the_same_parameters_give_the_same_bytes(tmp_path: Path) -> None:
    """Two folders are equal; a second write into one of them does nothing; another seed replaces the weights."""
    assert write_demo_model(tmp_path / "a", SMALL)
    assert write_demo_model(tmp_path / "b", SMALL)
    first = contents(tmp_path / "a")
    assert contents(tmp_path / "b") == first
    assert not write_demo_model(tmp_path / "a", SMALL)
    assert write_demo_model(tmp_path / "a", replace(SMALL, seed=1))
    changed = {name for name, content in contents(tmp_path / "a").items() if content != first[name]}
    assert changed == {"model.safetensors", MARKER_FILE}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_whoever_may_read_a_file_may_read_all(tmp_path: Path) -> None:
    """The node may be another user's than the one that wrote the model."""
    write_demo_model(tmp_path / "demo", SMALL)
    before = os.umask(0o022)
    os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "demo").iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~before)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    """The user names a folder with files of theirs, or a file: refused, unchanged, nothing beside it."""
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    for path in (foreign, foreign / "thesis.txt"):
        with pytest.raises(DemoModelError, match="is no demo model"):
            write_demo_model(path, SMALL)
    assert contents(foreign) == {"thesis.txt": b"years of work"}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    """`mktemp -d` has made the folder already, or a whole path is missing."""
    (tmp_path / "empty").mkdir()
    assert write_demo_model(tmp_path / "empty", SMALL)
    assert write_demo_model(tmp_path / "x" / "y" / "z", SMALL)
    assert contents(tmp_path / "empty") == contents(tmp_path / "x" / "y" / "z")


@pytest.mark.parametrize("change", [{"num_kv_heads": 3}, {"head_dim": 7}, {"num_layers": 0}])
def test_sizes_that_do_not_fit_leave_nothing_behind(tmp_path: Path, change: dict[str, int]) -> None:
    """The error comes from the same checks as for any config; the half-written folder is gone."""
    with pytest.raises(ConfigFileError, match=r"the demo model|head"):
        write_demo_model(tmp_path / "demo", replace(SMALL, **change))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    """Byte-level tokens and the two marks need 258 ids."""
    with pytest.raises(DemoModelError, match="take 258"):
        replace(SMALL, vocab_size=257)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """The parent is a file."""
    (tmp_path / "file").touch()
    with pytest.raises(DemoModelError, match="cannot write a demo model to"):
        write_demo_model(tmp_path / "file" / "demo", SMALL)
