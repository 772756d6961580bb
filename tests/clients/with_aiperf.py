"""`aiperf`: synthetic prompts, some at a time, streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import MODEL, api_key, base_url, model_dir, program, run

HERE = Path.cwd()
REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 12, 64, 16


def measured(kind: str) -> Any:
    out = HERE / kind
    arguments = ["profile", "--model", MODEL, "--url", base_url().removesuffix("/v1"), "--api-key", api_key()]
    arguments += ["--endpoint-type", kind, "--streaming", "--tokenizer", model_dir(), "--concurrency", "4"]
    arguments += ["--request-count", str(REQUESTS), "--prompt-input-tokens-mean", str(PROMPT_TOKENS)]
    arguments += ["--prompt-output-tokens-mean", str(ANSWER_TOKENS), "--extra-inputs", "ignore_eos:true"]
    arguments += ["--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
    arguments += ["--output-artifact-dir", str(out)]
    program(
        "aiperf", *arguments, folder=HERE, env={"HF_HUB_OFFLINE": ""}
    )  # else it takes a folder for a name on the hub
    (path,) = out.rglob("profile_export_aiperf.json")
    return json.loads(path.read_text())


def check(report: Any) -> None:
    """Every request is answered, with as many tokens as it has asked for."""
    assert report["request_count"]["avg"] == REQUESTS
    assert not report.get("error_request_count"), report["error_summary"]
    lengths = report["output_sequence_length"]
    assert (lengths["min"], lengths["max"]) == (ANSWER_TOKENS, ANSWER_TOKENS), lengths
    assert report["time_to_first_token"]["avg"] > 0


def case_chat() -> None:
    check(measured("chat"))


def case_completions() -> None:
    check(measured("completions"))


if __name__ == "__main__":
    run(globals())
