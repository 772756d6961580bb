"""The requests of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cli.sampling import SamplingChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    name: str
    prompt: str
    sampling: SamplingChoice
    unary: bool = False


_TALE: Final = " ".join([
    "The runner carries a wooden baton along the river, and nobody is surprised.",
    "The teacher reads aloud the second letter before breakfast, because there is still time.",
    "The sailor repairs a broken clock during the storm, although it begins to rain.",
    "The gardener gathers a hundred stones behind the station, so that nothing is lost.",
    "The librarian returns the morning paper without a word, until the others arrive.",
    "The carpenter measures the narrow bridge in the middle of the night, while the whole village sleeps.",
    "The grandmother remembers a forgotten song beside the lighthouse, and then everything starts again.",
])  # fmt: skip
"""A beginning of several blocks that some requests share."""
_LONG_TALE: Final = " ".join([_TALE] * 6)
"""More tokens than one step takes: its prefill is in chunks."""

FIRST_WAVE: Final = (
    DemoRequest(
        name="greedy",
        prompt="Tell me a short story about a relay race.",
        sampling=SamplingChoice(temperature=0, max_tokens=64),
    ),
    DemoRequest(
        name="shared-1",
        prompt=f"{_TALE} Where does the road lead?",
        sampling=SamplingChoice(temperature=0, max_tokens=24),
    ),
    DemoRequest(
        name="shared-2",
        prompt=f"{_TALE} Who invented the wheel, and when?",
        sampling=SamplingChoice(temperature=0.8, seed=7, max_tokens=24),
    ),
    DemoRequest(
        name="seeded-top-p",
        prompt="Give three reasons for planting trees.",
        sampling=SamplingChoice(temperature=1.0, top_p=0.9, seed=42, max_tokens=32),
    ),
    DemoRequest(
        name="seeded-top-k",
        prompt="Why is the sky blue in the afternoon and red in the evening?",
        sampling=SamplingChoice(temperature=0.7, top_k=20, seed=2024, max_tokens=32),
    ),
    DemoRequest(
        name="unary",
        prompt="Good morning! Could you please explain how a computer works?",
        sampling=SamplingChoice(temperature=0, max_tokens=16),
        unary=True,
    ),
    DemoRequest(
        name="long",
        prompt=f"{_LONG_TALE} Summarise the following paragraph in one sentence.",
        sampling=SamplingChoice(temperature=0, max_tokens=16),
    ),
)
SECOND_WAVE: Final = (
    DemoRequest(
        name="shared-3",
        prompt=f"{_TALE} What is the capital of that country?",
        sampling=SamplingChoice(temperature=0, max_tokens=24),
    ),
    DemoRequest(
        name="long-again",
        prompt=f"{_LONG_TALE} Which of these numbers is the smallest?",
        sampling=SamplingChoice(temperature=0.5, seed=11, max_tokens=16),
    ),
)
