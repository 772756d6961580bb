"""Trains the demo's model on the text of `engine/tales/text.py`, and writes its files into `engine/tales/model/`.

    python -m engine.tales.train

takes minutes on two cores, and needs the package `transformers`. The same seed gives the same text; the weights are the
same on the same CPU with the same PyTorch only.

Array suffixes: R rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from engine.demo_model import (
    BOS_TOKEN,
    EOS_ID,
    MARKER_FILE,
    TRAINED_FILES,
    WEIGHTS_FILE,
    DemoModelParams,
    as_json,
    model_config,
    train_tokenizer,
    write_description,
)
from engine.model_config import LM_HEAD, ModelFamily
from engine.tales.text import Chat, Document, Speaker, documents

SHAPE: Final = DemoModelParams(
    family=ModelFamily.QWEN3, num_layers=5, hidden_size=160, intermediate_size=448, num_heads=5, num_kv_heads=5,
    head_dim=32, vocab_size=1536, tie_word_embeddings=True,
)  # fmt: skip
"""1.8 million weights, 3.7 MB in bfloat16."""
SAMPLING: Final = {"temperature": 0.7, "top_p": 0.95}
TOKENIZER_DOCUMENTS: Final = 6_000
LEARNING_RATE: Final = 3e-3
WARM_UP_STEPS: Final = 50
WEIGHT_DECAY: Final = 0.1
GRADIENT_NORM_MAX: Final = 1.0
HELD_OUT_BATCHES: Final = 8
SORTED_DOCUMENTS: Final = 512
"""So many at a time are sorted by length."""
REPORT_STEPS: Final = 100
HELD_OUT_SEED: Final = 1_000_003
"""Of documents that the model is not trained on."""
IGNORED: Final = -100
"""Target of a token after which nothing is to be learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How long, and on how much at a time."""

    seed: int = 0
    steps: int = 800
    batch_tokens: int = 4_096
    """With what fills rows up."""


def tokenizer_of(seed: int, vocab_size: int = SHAPE.vocab_size, count: int = TOKENIZER_DOCUMENTS) -> Tokenizer:
    lines = (
        line
        for document in islice(documents(seed), count)
        for line in ([document] if isinstance(document, str) else [message.text for message in document.messages])
    )
    # A word stands behind a space almost everywhere, and the template's words at the beginning of a line.
    return train_tokenizer((f" {line}\nuser: \nassistant: \nsystem:" for line in lines), vocab_size)


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Tokens, and for each the token that is to follow it: IGNORED in what a chat's user says.

    A chat is written as its template writes it.
    """
    if isinstance(document, str):
        ids = tokenizer.encode(document).ids
        return [*ids, EOS_ID], [*ids[1:], EOS_ID, IGNORED]
    tokens, targets = _encode_chat(tokenizer, document)
    return [*tokens, EOS_ID], [*targets, IGNORED]


def _encode_chat(tokenizer: Tokenizer, chat: Chat) -> tuple[list[int], list[int]]:
    tokens: list[int] = list(tokenizer.encode(BOS_TOKEN).ids)
    targets = [IGNORED] * len(tokens)
    for message in chat.messages:
        head = tokenizer.encode(f"{message.speaker.value}:").ids
        body = tokenizer.encode(f" {message.text}").ids
        if targets and len(tokens) > 1:
            tokens += (line_end := tokenizer.encode("\n").ids)
            targets += [IGNORED] * len(line_end)
        tokens += [*head, *body]
        if message.speaker is Speaker.ASSISTANT:
            targets += [*[IGNORED] * (len(head) - 1), *body, EOS_ID]
        else:
            targets += [IGNORED] * (len(head) + len(body))
    return tokens, targets


def batches(tokenizer: Tokenizer, course: Course, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens [R, T] and targets [R, T]: each row is a document, beside others that are about as long."""
    source, rng = documents(seed), random.Random(seed)
    while True:
        encoded = [encode(tokenizer, document) for document in islice(source, SORTED_DOCUMENTS)]
        encoded.sort(key=lambda pair: len(pair[0]))
        found: list[list[tuple[list[int], list[int]]]] = [[]]
        for pair in encoded:
            if found[-1] and len(pair[0]) * (len(found[-1]) + 1) > course.batch_tokens:
                found.append([])
            found[-1].append(pair)
        rng.shuffle(found)
        for pairs in found:
            size = max(len(tokens) for tokens, _ in pairs)
            yield (
                torch.tensor([tokens + [EOS_ID] * (size - len(tokens)) for tokens, _ in pairs]),
                torch.tensor([targets + [IGNORED] * (size - len(targets)) for _, targets in pairs]),
            )


def new_model(params: DemoModelParams, seed: int) -> Any:
    """Of transformers, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # not of the packages that Baton needs to run

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**model_config(params)))


def train(model: Any, tokenizer: Tokenizer, course: Course) -> Iterator[float]:
    """Each step's loss, as it is made."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_share(step, course.steps))
    for tokens_rt, targets_rt in islice(batches(tokenizer, course, course.seed), course.steps):
        loss = loss_of(model, tokens_rt, targets_rt)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.item()


def rate_share(step: int, steps: int) -> float:
    """Of the learning rate: up along a line, then down to nothing along a cosine."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)))


def loss_of(model: Any, tokens_rt: torch.Tensor, targets_rt: torch.Tensor) -> torch.Tensor:
    """Mean over the targets, in nats. Products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(input_ids=tokens_rt, use_cache=False).logits
    return cross_entropy(scores.float().flatten(0, 1), targets_rt.flatten(), ignore_index=IGNORED)


def held_out_loss(model: Any, tokenizer: Tokenizer, course: Course) -> float:
    with torch.no_grad():
        losses = [
            loss_of(model, *batch) for batch in islice(batches(tokenizer, course, HELD_OUT_SEED), HELD_OUT_BATCHES)
        ]
    return torch.stack(losses).mean().item()


def write(folder: Path, model: Any, tokenizer: Tokenizer, params: DemoModelParams, record: dict[str, Any]) -> None:
    """The model in bfloat16, and beside it what it was made with."""
    folder.mkdir(parents=True, exist_ok=True)
    write_description(folder, model_config(params) | {"dtype": "bfloat16"}, tokenizer, SAMPLING)
    tensors = {name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items() if name != LM_HEAD}
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as new:
        save_file(tensors, new.name, metadata={"format": "pt"})
    weights = Path(new.name).rename(folder / WEIGHTS_FILE)
    weights.chmod(0o644)
    record = {**record, "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    (folder / MARKER_FILE).write_text(as_json(record), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    course = Course()
    parser = argparse.ArgumentParser(prog="python -m engine.tales.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=course.seed)
    parser.add_argument("--steps", type=int, default=course.steps)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--into", type=Path, default=TRAINED_FILES, metavar="DIR")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    course = Course(seed=args.seed, steps=args.steps)
    began_s = time.monotonic()
    tokenizer = tokenizer_of(course.seed)
    model = new_model(SHAPE, course.seed)
    losses = []
    for step, loss in enumerate(train(model, tokenizer, course), 1):
        losses.append(loss)
        if step % REPORT_STEPS == 0 or step == course.steps:
            mean = sum(losses[-REPORT_STEPS:]) / len(losses[-REPORT_STEPS:])
            print(f"step {step} of {course.steps}: loss {mean:.3f}, {time.monotonic() - began_s:.0f} s", flush=True)
    model.to(torch.bfloat16)
    loss = held_out_loss(model, tokenizer, course)
    print(f"held-out loss in bfloat16: {loss:.3f}")
    record = {
        "made_by": f"python -m engine.tales.train --seed {course.seed} --steps {course.steps}",
        "held_out_loss": round(loss, 3),
        "torch": torch.__version__,
    }
    write(args.into, model, tokenizer, SHAPE, record)
    print(f"{args.into}: written")


if __name__ == "__main__":
    main()
