"""What a streamed token costs when its answer is split into content, reasoning and calls, beside one that is not.

Both are the JSON of a chunk from a token's text (`Replies.chunk`), in alternating rounds:

    python -m benchmarks.answer_forms
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Final

from batonpb import resume_pb2

from router.answer_forms import AnswerForm, ToolForm
from router.answers import AnswerPart
from router.openai import OpenAiCall
from router.replies import Replies

ROUNDS: Final = 21
WORDS: Final = [" the", " sea", " is", " never", ",", " quite", " as", " blue", "\n", " then"] * 40
ARGUMENTS: Final = json.dumps({"text": "".join(WORDS), "days": list(range(99))})
CALL: Final = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWERS: Final = {
    "content": WORDS,
    "reasoning": ["<think>", *WORDS],
    "a call": [CALL[at : at + 4] for at in range(0, len(CALL), 4)],
}
"""Each as the texts of its tokens."""


def chunks(texts: list[str], *, split: bool) -> Callable[[], object]:
    reading = resume_pb2.AnswerReading(tools=True, parallel=True) if split else None
    form = AnswerForm(tools=ToolForm.HERMES, think=("<think>", "</think>"))
    parts = [AnswerPart(i, (i,), text, (), None) for i, text in enumerate(texts)]
    call = OpenAiCall(chat=True, requests=(), n=1, stream=True, include_usage=False, logprobs=False, reading=reading)

    def run() -> None:
        replies = Replies(request_id="r", call=call, model="m", created=1, token_text=str, form=form)
        for part in parts:
            replies.chunk(0, part)

    return run


def main() -> None:
    for name, texts in ANSWERS.items():
        plain, split = chunks(texts, split=False), chunks(texts, split=True)
        took_us: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for which, run in ((False, plain), (True, split)):
                began_s = time.perf_counter()
                for _ in range(5):
                    run()
                took_us[which].append((time.perf_counter() - began_s) / 5 / len(texts) * 1e6)
        before, after = (statistics.median(took_us[which]) for which in (False, True))
        print(f"{name:10} {before:6.2f} us -> {after:6.2f} us a token, ratio {after / before:.2f}")


if __name__ == "__main__":
    main()
