"""Writes small models in the Hugging Face layout: a trained one for demos, and random ones of any size for tests.

The trained one tells simple stories; `engine/tales/` has its text, its training and its files. A random one says
English words in no order, but its scores depend on the whole context and are well apart, so that any error in
positions, cache or handoff changes its answer. transformers loads both. Needs no torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.model_config import (
    EMBEDDING,
    GENERATION_CONFIG,
    LM_HEAD,
    ModelError,
    ModelFamily,
    parse_model_config,
    weight_shapes,
)

_PEOPLE = """
the runner, the carrier, the baker, the teacher, the sailor, the painter, the farmer, the doctor, the driver,
the builder, the singer, the writer, the keeper, the neighbour, the engineer, the gardener, the captain, the child,
the visitor, the student, the grandmother, the postman, the fisherman, the shepherd, the librarian, the carpenter
"""
_ACTIONS = """
carries, passes, follows, remembers, forgets, watches, repairs, measures, counts, gathers, opens, closes, paints,
writes down, reads aloud, borrows, returns, protects, discovers, describes, explains, collects, prepares, delivers,
examines, improves, imagines, compares, translates, celebrates, questions, understands, arranges, completes
"""
_THINGS = """
a wooden baton, the second letter, an old machine, the long answer, a bright lantern, the quiet question,
a heavy basket, the yellow window, a broken clock, the narrow bridge, a silver spoon, the morning paper,
a forgotten song, the northern road, a hundred stones, the garden wall, an empty bottle, the railway ticket,
a careful drawing, the winter coat, a small mistake, the largest number, a memory of summer, the kitchen table,
a bundle of feathers, the language of birds, a blanket of snow, the shape of the island, a picture of the harbour
"""
_PLACES = """
along the river, before breakfast, behind the station, between two mountains, during the storm, near the market,
under the bridge, without a word, after the harvest, above the clouds, across the valley, inside the library,
on the last evening, at the edge of the forest, in the middle of the night, beside the lighthouse,
through the open door, from early spring until autumn, as slowly as possible, more quickly than anyone expected
"""
_ENDINGS = """
and nobody is surprised, because there is still time, although it begins to rain, until the others arrive,
so that nothing is lost, while the whole village sleeps, whenever the weather changes, unless somebody objects,
which makes the next step easier, but the story does not end here, and then everything starts again
"""
_QUESTIONS = """
Where does the road lead? How many people live in this town? What is the capital of that country?
Why is the sky blue in the afternoon and red in the evening? Who invented the wheel, and when? Which of these numbers
is the smallest? Could you please explain how a computer works? Tell me a short story about a relay race. Write a
letter to a friend who lives abroad. Give three reasons for planting trees. Summarise the following paragraph in one
sentence. Hello! Good morning, good evening, and thank you very much. Yes, no, perhaps, of course. One, two, three,
four, five, six, seven, eight, nine, ten, eleven, twelve, twenty, fifty, a thousand. Monday, Tuesday, Wednesday,
Thursday, Friday, Saturday, Sunday. January, February, March, April, May, June, July, August, September, October,
November, December. In 1969, 1984, 2000 and 2024; at 7:30, 12:15 and 18:45; 3.14, 2.72, 100%, $20, (a + b) * c = d.
"""
_VERBS = """
walk talk jump climb paint plant open count gather follow answer ask call clean cook dream enter fail fill fold gain
greet guard guess hand harvest heal help hunt join kick knock laugh lead learn lend lift light listen load lock look
mark melt mend milk need number offer order pack pass pick point pour pull push rain reach reason record remind rent
report rest return roll row sail scatter search seek seem sell send shout show sing sleep snow soften sort sound spell
spend spoil stand start stay steer stretch support sweep swing tend test thank touch train travel treat turn visit wait
wander warm warn wash watch water weigh whisper winter wish wonder work yell absorb accept adopt alarm appear attend
awaken balance blend boil borrow bother burn climate collect comfort command connect consider consult contain cover
craft defend deliver demand depend design detect develop discuss display doubt draw dress drift earn employ encounter
expand export extend filter finish flash float flow form frighten furnish govern grant hammer happen import indent
inform insist instruct invent kindle land last limit link matter mention monitor murmur obtain paper perform plaster
polish predict present press print proceed profit project prompt protest publish question recall recover reflect
refresh regard remain request research respond result reveal reward sample select shelter signal sketch splash succeed
suggest suspect transform transport treasure uncover vanish
"""
_SUFFIXES = ("", "s", "ed", "ing")


def demo_lines() -> Iterator[str]:
    """About fifteen hundred lines, the same each time: every phrase stands beside many others."""
    people, actions, things, places, endings = (
        [phrase.strip().replace("\n", " ") for phrase in block.split(",")]
        for block in (_PEOPLE, _ACTIONS, _THINGS, _PLACES, _ENDINGS)
    )
    yield from _QUESTIONS.strip().splitlines()
    for verb in _VERBS.split():
        yield " ".join(f" and {verb}{suffix}" for suffix in _SUFFIXES)
    for i in range(600):
        person, other = people[i % len(people)], people[i * 7 % len(people)]
        action, thing = actions[i * 3 % len(actions)], things[i * 5 % len(things)]
        place, ending = places[i * 11 % len(places)], endings[i % len(endings)]
        yield f"{person.capitalize()} {action} {thing} {place}, {ending}."
        yield f"{place.capitalize()}, {other} {action} {thing}."


BOS_TOKEN, EOS_TOKEN = "<|begin|>", "<|end|>"
BOS_ID, EOS_ID = 0, 1
_RESERVED = "<|reserved_"
BYTE_TOKENS = 256
MARKER_FILE = "baton_demo_model.json"
"""Holds what a demo model was made with; a folder with it is ours to replace."""
WEIGHTS_FILE: Final = "model.safetensors"
TRAINED_FILES: Final = Path(__file__).parent / "tales" / "model"
"""The trained demo model, as `python -m engine.tales.train` made it."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role + ': ' + message.content | trim + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""Jinja, as transformers has it."""
LOGIT_STD = 3.0
"""Spread of the scores: the best two of 2,048 are about 0.8 apart, rounding in float32 is about 1e-5."""


class DemoModelError(ModelError):
    """The demo model cannot be written there, or not with these sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModelParams:
    """Sizes of a demo model; the defaults take 13 MB."""

    family: ModelFamily = ModelFamily.LLAMA
    num_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 2048
    context_len_max: int = 4096
    tie_word_embeddings: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocab_size < BYTE_TOKENS + 2:
            raise DemoModelError(f"vocab_size {self.vocab_size} is too small: bytes and marks take {BYTE_TOKENS + 2}")


def write_demo_model(folder: Path, params: DemoModelParams | None = None) -> bool:
    """Write a demo model into `folder`, atomically: others see either nothing, the old one, or all of the new one.

    Returns False, and writes nothing, where the same model already is. A demo model of other parameters is replaced.
    The same parameters give the same bytes.

    Raises:
        DemoModelError: the folder holds something else, or cannot be written.
        ConfigFileError: the sizes do not fit each other.
    """
    params = params or DemoModelParams()
    marker = as_json(asdict(params) | {"family": params.family.value, "format": 2})
    return _replace(folder, marker, lambda new: _write_files(new, params))


def write_trained_model(folder: Path) -> bool:
    """Write the trained demo model into `folder`, as `write_demo_model` does a random one.

    Raises DemoModelError: the folder holds something else, or cannot be written.
    """

    def copy(new: Path) -> None:
        for path in TRAINED_FILES.iterdir():
            shutil.copyfile(path, new / path.name)  # whoever may read the others may read it: no modes of the package's

    return _replace(folder, (TRAINED_FILES / MARKER_FILE).read_text(encoding="utf-8"), copy)


def _replace(folder: Path, wanted: str, write: Callable[[Path], None]) -> bool:
    """`wanted` is the marker of the model that `write` writes."""
    try:
        return _try_replace(folder, wanted, write)
    except OSError as error:
        raise DemoModelError(f"cannot write a demo model to {folder}: {error}") from error


def _try_replace(folder: Path, wanted: str, write: Callable[[Path], None]) -> bool:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        marker = folder / MARKER_FILE
        if not marker.is_file():
            raise DemoModelError(f"{folder} exists and is no demo model: it is left as it is; name another folder")
        if marker.read_text(encoding="utf-8") == wanted:
            return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        new = workspace / "new"
        new.mkdir()
        write(new)
        (new / MARKER_FILE).write_text(wanted, encoding="utf-8")
        if folder.exists():
            os.rename(folder, workspace / "old")
        os.rename(new, folder)
    finally:
        shutil.rmtree(workspace)
    return True


def _write_files(folder: Path, params: DemoModelParams) -> None:
    config = model_config(params)
    tokenizer = train_tokenizer(demo_lines(), params.vocab_size)
    write_description(folder, config, tokenizer)
    tensors = _tensors(config, params.seed, _unprintable_ids(tokenizer))
    weights = folder / WEIGHTS_FILE
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod((folder / "config.json").stat().st_mode)  # the library lets nobody else read it


def write_description(
    folder: Path, config: dict[str, Any], tokenizer: Tokenizer, sampling: Mapping[str, float] | None = None
) -> None:
    """All of a model's files but the weights. `sampling`: defaults for requests that name none."""
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, **(sampling or {})}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {"config.json": config, GENERATION_CONFIG: generation, "tokenizer_config.json": tokenizer_config}
    for name, content in files.items():
        (folder / name).write_text(as_json(content), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


def model_config(params: DemoModelParams) -> dict[str, Any]:
    """What config.json says of float32 weights."""
    config: dict[str, Any] = {
        "architectures": [params.family.value],
        "model_type": params.family.name.lower(),
        "vocab_size": params.vocab_size,
        "hidden_size": params.hidden_size,
        "intermediate_size": params.intermediate_size,
        "num_hidden_layers": params.num_layers,
        "num_attention_heads": params.num_heads,
        "num_key_value_heads": params.num_kv_heads,
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_bias": False,
        "tie_word_embeddings": params.tie_word_embeddings,
        "max_position_embeddings": params.context_len_max,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
    }
    if params.family is ModelFamily.MISTRAL:
        config["sliding_window"] = None
    return config


def _unprintable_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that a terminal should not see: control bytes, parts of characters, reserved tokens."""
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())}
    shown = {EOS_ID} | {token for token, text in texts.items() if text.isascii() and text.isprintable()}
    return [token for token, text in texts.items() if token not in shown or text.startswith((BOS_TOKEN, _RESERVED))]


def _tensors(config: dict[str, Any], seed: int, quiet_ids: list[int]) -> dict[str, np.ndarray]:
    """Random weights that all matter: each layer adds about as much as there is, and the output is scaled to
    LOGIT_STD. The embedding is as small: tied to the output, it would else favour repeating the last token. Tokens of
    `quiet_ids` get scores near 0: they are drawn rarely and are never the best."""
    shapes = weight_shapes(parse_model_config(config, source="the demo model", generation={}))
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape, dtype=np.float32)
        if name.endswith(".bias"):
            tensors[name] = np.float32(0.5) * noise
        elif len(shape) == 1:
            tensors[name] = 1.0 + np.float32(0.1) * noise
        else:
            gain = LOGIT_STD if name in (EMBEDDING, LM_HEAD) else 1.5
            tensors[name] = noise * np.float32(gain / math.sqrt(shape[1]))
    output = EMBEDDING if config["tie_word_embeddings"] else LM_HEAD
    tensors[output][quiet_ids] *= np.float32(0.05)
    return tensors


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE trained on these lines; ids that training leaves over are named reserved tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    left_over = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"{_RESERVED}{i}|>" for i in range(left_over)])
    return tokenizer


def as_json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
