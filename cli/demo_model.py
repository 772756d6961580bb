"""`baton demo-model`: a small model to try things with, trained or random."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from baton.errors import BatonError, Reason
from engine.demo_model import DemoModelParams, write_demo_model, write_trained_model
from engine.model_config import ModelError, ModelFamily

FAMILIES: Final = {
    "llama": ModelFamily.LLAMA,
    "mistral": ModelFamily.MISTRAL,
    "qwen2": ModelFamily.QWEN2,
    "qwen3": ModelFamily.QWEN3,
}
# More than anybody tries things with. All of them at once make a model of about 7 GB.
LAYERS_MAX: Final = 64
HIDDEN_SIZE_MAX: Final = 4096
VOCAB_SIZE_MAX: Final = 1 << 17
CONTEXT_MAX: Final = 1 << 20


@click.command("demo-model")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--random", is_flag=True, help="Random weights; so does each option below.")
@click.option("--family", type=click.Choice(list(FAMILIES)), help="Architecture.  [default: llama]")
@click.option("--seed", type=click.IntRange(min=0), help="Same seed, same model.  [default: 0]")
@click.option("--layers", type=click.IntRange(1, LAYERS_MAX), help="Number of layers.  [default: 4]")
@click.option("--hidden-size", type=click.IntRange(1, HIDDEN_SIZE_MAX), help="Width of the model.  [default: 256]")
@click.option("--vocab-size", type=click.IntRange(1, VOCAB_SIZE_MAX), help="Tokens of the tokenizer.  [default: 2048]")
@click.option(
    "--context", type=click.IntRange(1, CONTEXT_MAX), help="Longest prompt and answer together.  [default: 4096]",
)  # fmt: skip
def demo_model(
    folder: Path, random: bool, family: str | None, seed: int | None, layers: int | None, hidden_size: int | None,
    vocab_size: int | None, context: int | None,
) -> None:  # fmt: skip
    """Write a small model and its tokenizer into DIR, in the Hugging Face layout.

    It is trained to tell simple stories and to talk of animals, weather and the sea. With --random, or any option of
    its shape, its weights are random: it says English words in no order, yet its answers depend on the whole prompt.
    DIR may be new, empty, or an earlier demo model, which is replaced.

    \b
    Example:
      baton demo-model /tmp/demo-model
      baton demo-model /tmp/random-model --family qwen3 --seed 7
    """
    named = {
        "family": FAMILIES[family] if family else None,
        "seed": seed,
        "num_layers": layers,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "context_len_max": context,
    }
    shape = {name: value for name, value in named.items() if value is not None}
    try:
        params = DemoModelParams(**shape) if random or shape else None  # type: ignore[arg-type]
        written = write_demo_model(folder, params) if params else write_trained_model(folder)
    except ModelError as error:
        raise BatonError(Reason.BAD_CONFIG, str(error)) from error
    click.echo(f"{folder}: {'written' if written else 'there already, the same one'}")
