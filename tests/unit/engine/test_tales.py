"""The trained demo model: what is in the tree speaks English, and the script that made it runs."""

from __future__ import annotations

import hashlib
import json
import random
from itertools import islice
from pathlib import Path
from typing import Final

import jinja2
import pytest
import torch

from cli.reference import Reference
from engine.demo_model import (
    BOS_TOKEN,
    CHAT_TEMPLATE,
    EOS_ID,
    MARKER_FILE,
    TRAINED_FILES,
    WEIGHTS_FILE,
    DemoModelError,
    DemoModelParams,
    write_demo_model,
    write_trained_model,
)
from engine.model_config import ComputeDtype, ModelFamily, SamplingDefaults, load_model_config, load_sampling_defaults
from engine.tales.text import TOPICS, Chat, Message, Speaker, documents, story, vocabulary, words_of
from engine.tales.train import IGNORED, Course, encode, held_out_loss, new_model, rate_share, tokenizer_of
from engine.tales.train import train as train_model
from engine.tales.train import write as write_files
from engine.types import SamplingParams

BYTES_MAX: Final = 4_000_000
TOKENS_MAX: Final = 320
TINY: Final = DemoModelParams(
    family=ModelFamily.QWEN3, num_layers=1, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=2,
    head_dim=16, vocab_size=400, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "model"
    assert write_trained_model(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, num_blocks=64, compute_threads=1, dtype=ComputeDtype.FLOAT32)


def greedy(reference: Reference, prompt: str) -> tuple[str, bool]:
    """The best answer, and whether it ended by itself."""
    params = SamplingParams(
        temperature=0, top_k=0, top_p=1, seed=0, max_tokens=TOKENS_MAX, stop_token_ids=frozenset({EOS_ID})
    )
    ids = reference.answer(reference.encode(prompt), params)
    return reference.decode([token for token in ids if token != EOS_ID]), ids[-1] == EOS_ID


def chat(user: str, system: str = "") -> str:
    head = f"system: {system}\n" if system else ""
    return f"{BOS_TOKEN}{head}user: {user}\nassistant:"


def test_a_story_is_told_to_its_end(reference: Reference) -> None:
    """Every word is one that the text has, the last sentence is whole, and the hero is named more than once."""
    text, ended = greedy(reference, "Once upon a time")
    assert ended
    assert text.endswith((".", '."', "!"))
    assert words_of(text) - vocabulary() == set()
    assert len(text.split()) > 20


@pytest.mark.parametrize("topic", [topic.name for topic in TOPICS if topic.name.startswith("the ")])
def test_a_question_gets_an_answer(reference: Reference, topic: str) -> None:
    """Of whole sentences, in the text's words, about what was asked."""
    text, ended = greedy(reference, chat(f"Tell me of {topic}."))
    assert ended
    assert text.endswith(".")
    assert words_of(text) - vocabulary() == set()
    assert topic.removeprefix("the ") in text.lower()


def test_an_answer_is_brief_where_the_system_asks_for_it(reference: Reference) -> None:
    """One sentence."""
    text, ended = greedy(reference, chat("Tell me of the sea.", system="Be brief."))
    assert ended
    assert text.count(".") == 1


def test_the_files_are_small_and_say_how_they_were_made() -> None:
    """Below the limit for the tree; the record has the command, and is about these weights."""
    assert sum(path.stat().st_size for path in TRAINED_FILES.iterdir()) < BYTES_MAX
    record = json.loads((TRAINED_FILES / MARKER_FILE).read_text())
    assert record["made_by"] == f"python -m engine.tales.train --seed 0 --steps {Course().steps}"
    assert record["weights_sha256"] == hashlib.sha256((TRAINED_FILES / WEIGHTS_FILE).read_bytes()).hexdigest()


def test_the_model_is_the_one_that_the_script_makes(model: Path) -> None:
    """Tokenizer and configuration are what today's text and script give; sampling has defaults of its own."""
    assert json.loads((model / "tokenizer.json").read_text()) == json.loads(tokenizer_of(0).to_str())
    assert load_model_config(model).stored_dtype == "bfloat16"
    assert load_sampling_defaults(model) == SamplingDefaults(temperature=0.7, top_p=0.95)


def test_a_random_model_gives_way_to_the_trained_one(tmp_path: Path, model: Path) -> None:
    """In the same folder, and the other way round; the same model twice is written once; foreign files stay."""
    folder = tmp_path / "demo"
    random_model = DemoModelParams(num_layers=1, hidden_size=16, num_heads=2, head_dim=8, vocab_size=300)
    assert write_demo_model(folder, random_model)
    assert write_trained_model(folder)
    assert not write_trained_model(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    assert write_demo_model(folder, random_model)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(DemoModelError, match="is no demo model"):
        write_trained_model(tmp_path)


def test_the_text_depends_on_its_seed_only() -> None:
    """The same seed gives the same documents, another one others, and among a hundred there are both kinds."""
    first = list(islice(documents(3), 100))
    assert first == list(islice(documents(3), 100))
    assert first != list(islice(documents(4), 100))
    assert {type(document) for document in first} == {str, Chat}


def test_a_story_keeps_to_its_hero() -> None:
    """Whatever the seed: no slot is left open, nobody meets a namesake, and the kind asked for is told of."""
    for seed in range(200):
        text = story(random.Random(seed), kind="otter", short=seed % 2 == 0)
        assert "otter" in text
        assert not set("{}") & set(text)
        assert text.endswith((".", '."', "!"))


def test_a_chat_is_trained_as_the_template_writes_it() -> None:
    """The tokens are those of the template's text; what is learned is each answer and that it ends there."""
    turns = ("Be brief.", "Who are you?", "I am a small model.", "Why?", "I do not know why.")
    speakers = (Speaker.SYSTEM, *[Speaker.USER, Speaker.ASSISTANT] * 2)
    messages = [Message(speaker=speaker, text=text) for speaker, text in zip(speakers, turns, strict=True)]
    tokenizer = tokenizer_of(0, count=200)
    tokens, targets = encode(tokenizer, Chat(messages=tuple(messages)))
    shown = [{"role": message.speaker.value, "content": message.text} for message in messages]
    rendered = jinja2.Template(CHAT_TEMPLATE, keep_trailing_newline=True).render(messages=shown, bos_token=BOS_TOKEN)
    assert tokens == [*tokenizer.encode(rendered.removesuffix("\n")).ids, EOS_ID]
    learned = [target for target in targets if target != IGNORED]
    assert tokenizer.decode(learned, skip_special_tokens=False) == f" {turns[2]}<|end|> {turns[4]}<|end|>"


def test_the_training_learns(tmp_path: Path) -> None:
    """A tiny model, a few steps: the loss falls, and what is written is a model that the engine loads."""
    torch.set_num_threads(1)
    course = Course(steps=12, batch_tokens=512)
    tokenizer = tokenizer_of(0, TINY.vocab_size, count=100)
    model = new_model(TINY, seed=0)
    before = held_out_loss(model, tokenizer, course)
    assert len(list(train_model(model, tokenizer, course))) == 12
    assert held_out_loss(model, tokenizer, course) < before
    write_files(tmp_path / "new", model.to(torch.bfloat16), tokenizer, TINY, {})
    loaded = Reference(tmp_path / "new", num_blocks=64, compute_threads=1)
    assert greedy(loaded, "Once upon a time") != ("", False)


def test_the_learning_rate_rises_and_falls() -> None:
    """All of it after fifty steps, half of it in the middle of the rest, none at the end."""
    assert [rate_share(step, 150) for step in (0, 49, 50)] == [0.02, 1.0, 1.0]
    assert rate_share(100, 150) == pytest.approx(0.5)
    assert rate_share(150, 150) == pytest.approx(0.0)
