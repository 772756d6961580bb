"""`baton demo-model`: a small model with random weights, to try things with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from baton.errors import BatonError, Reason
from engine.demo_model import DemoModelParams, write_demo_model
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
@click.option("--family", type=click.Choice(list(FAMILIES)), default="llama", show_default=True, help="Architecture.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Same seed, same model.")
@click.option(
    "--layers", type=click.IntRange(1, LAYERS_MAX), default=4, show_default=True, help="Number of layers.",
)  # fmt: skip
@click.option(
    "--hidden-size", type=click.IntRange(1, HIDDEN_SIZE_MAX), default=256, show_default=True,
    help="Width of the model.",
)  # fmt: skip
@click.option(
    "--vocab-size", type=click.IntRange(1, VOCAB_SIZE_MAX), default=2048, show_default=True,
    help="Tokens of the tokenizer.",
)  # fmt: skip
@click.option(
    "--context", type=click.IntRange(1, CONTEXT_MAX), default=4096, show_default=True,
    help="Longest prompt and answer together.",
)  # fmt: skip
def demo_model(
    folder: Path, family: str, seed: int, layers: int, hidden_size: int, vocab_size: int, context: int
) -> None:
    """Write a small model with random weights and a tokenizer into DIR, in the Hugging Face layout.

    It says English words in no order, yet its answers depend on the whole prompt. DIR may be new, empty, or an earlier
    demo model, which is replaced.

    \b
    Example:
      baton demo-model /tmp/demo-model --family qwen3 --seed 7
    """
    try:
        params = DemoModelParams(
            family=FAMILIES[family],
            seed=seed,
            num_layers=layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            context_len_max=context,
        )
        written = write_demo_model(folder, params)
    except ModelError as error:
        raise BatonError(Reason.BAD_CONFIG, str(error)) from error
    click.echo(f"{folder}: {'written' if written else 'there already, the same one'}")
