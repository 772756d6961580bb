"""`guidellm`: synthetic prompts, some at a time, streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import MODEL, api_key, base_url, model_dir, program, run

HERE = Path.cwd()
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 12, 64, 16


def measured(request_format: str) -> Any:
    """What the report says of the one measurement."""
    out = HERE / f"{request_format.strip('/').replace('/', '-')}.json"
    target = base_url().removesuffix("/v1")
    backend = f"kind=openai_http,target={target},model={MODEL},request_format={request_format},api_key={api_key()}"
    arguments = ["run", "--backend", backend, "--tokenizer", f"kind=hf_auto,model={model_dir()}"]
    arguments += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"]
    arguments += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    arguments += ["--output", f"kind=json,path={out}", "--disable-console"]
    program("guidellm", *arguments, folder=HERE)
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    return benchmark["metrics"]


def check(metrics: Any) -> None:
    """Every request is answered, with as many tokens as it has asked for."""
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0), totals
    answers = metrics["output_token_count"]["successful"]
    assert (answers["min"], answers["max"]) == (ANSWER_TOKENS, ANSWER_TOKENS), answers
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0


def case_chat() -> None:
    check(measured("/v1/chat/completions"))


def case_completions() -> None:
    check(measured("/v1/completions"))


if __name__ == "__main__":
    run(globals())
