"""What a streamed token costs when its answer is split into content, reasoning and calls, beside one that is not.

Both are the JSON of a chunk from a token's text (`Replies.chunk`), in alternating rounds. With vLLM's environment (see
`benchmarks.engine`) the same of its parsers (hermes, deepseek_r1) and its chunks, in the same run:

    python -m benchmarks.answer_forms --vllm ENV/bin/python
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

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
Chunks = Callable[[list[str], bool], Callable[[], object]]
"""(texts of an answer, whether it is split) -> makes its chunks."""


def own_chunks(texts: list[str], split: bool) -> Callable[[], object]:
    from batonpb import resume_pb2

    from router.answer_forms import AnswerForm, ToolForm
    from router.answers import AnswerPart
    from router.openai import OpenAiCall
    from router.replies import Replies

    reading = resume_pb2.AnswerReading(tools=True, parallel=True) if split else None
    form = AnswerForm(tools=ToolForm.HERMES, think=("<think>", "</think>"))
    parts = [AnswerPart(i, (i,), text, (), None) for i, text in enumerate(texts)]
    call = OpenAiCall(chat=True, requests=(), n=1, stream=True, include_usage=False, logprobs=False, reading=reading)

    def run() -> None:
        replies = Replies(request_id="r", call=call, model="m", created=1, token_text=str, form=form)
        for part in parts:
            replies.chunk(0, part)

    return run


def vllm_chunks(texts: list[str], split: bool) -> Callable[[], object]:
    """As its server does it: the parser of reasoning, then, where that is over, the one of calls."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]
    from vllm.entrypoints.generate.base.protocol import DeltaMessage  # type: ignore[import-not-found]
    from vllm.entrypoints.openai.chat_completion import protocol  # type: ignore[import-not-found]
    from vllm.reasoning import ReasoningParserManager  # type: ignore[import-not-found]
    from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]

    marks = ["<unk>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    vocab = {text: i for i, text in enumerate(dict.fromkeys([*marks, *texts]))}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<unk>")))
    request = protocol.ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], model="m")
    thinks = texts[0] == "<think>"

    def run() -> None:
        tools = ToolParserManager.get_tool_parser("hermes")(tokenizer)
        reasoning = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(tokenizer)
        said, ids = "", list[int]()
        for text in texts:
            before, before_ids, new = said, ids, [vocab[text]]
            delta = DeltaMessage(content=text)
            if split:
                said, ids = said + text, [*ids, *new]
                if thinks:
                    delta = reasoning.extract_reasoning_streaming(before, said, text, before_ids, ids, new)
                else:
                    delta = tools.extract_tool_calls_streaming(before, said, text, before_ids, ids, new, request)
            if delta is not None:
                choice = protocol.ChatCompletionResponseStreamChoice(index=0, delta=delta)
                chunk = protocol.ChatCompletionStreamResponse(id="r", created=1, model="m", choices=[choice])
                chunk.model_dump_json(exclude_unset=True)

    return run


def measure(chunks: Chunks) -> dict[str, list[float]]:
    """Microseconds of a token of each answer: as it is, and split."""
    found = {}
    for name, texts in ANSWERS.items():
        runs = [chunks(texts, split) for split in (False, True)]
        took_us: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for which, run in enumerate(runs):
                began_s = time.perf_counter()
                for _ in range(2):
                    run()
                took_us[which].append((time.perf_counter() - began_s) / 2 / len(texts) * 1e6)
        found[name] = [statistics.median(each) for each in took_us]
    return found


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="interpreter of an environment with vLLM")
    parser.add_argument("--only-vllm", action="store_true", help="by that interpreter: JSON of its figures")
    args = parser.parse_args()
    if args.only_vllm:
        print(json.dumps(measure(vllm_chunks)))
        return
    rows: dict[str, Mapping[str, Any]] = {"Baton": measure(own_chunks)}
    if args.vllm:
        command = [args.vllm, "-m", "benchmarks.answer_forms", "--only-vllm"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows["vLLM"] = json.loads(done.stdout.strip().splitlines()[-1])
    print("| server | answer | as it is, us | split, us | more by, us |\n|" + " --- |" * 5)
    for name, found in rows.items():
        for answer, (before, after) in found.items():
            print(f"| {name} | {answer} | {before:.2f} | {after:.2f} | {after - before:.2f} |")


if __name__ == "__main__":
    main()
