"""`lm-eval` with tasks of our own: multiple choice by log-likelihood, and generation until a stop string."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from cases import CONTEXT, MODEL, base_url, model_dir, program, run

CHOICES = [
    {"text": "The colour of the [sky]", "choices": ["blue", "red"], "answer": 0},
    {"text": "The colour of [grass]", "choices": ["red", "green"], "answer": 1},
    {"text": "The colour of [snow]", "choices": ["white", "black"], "answer": 0},
    {"text": "The colour of the [sky]", "choices": ["blue", "red"], "answer": 1},
]
"""Of the last one the model says the other."""
SUMS = [{"text": "How much is [two and two]", "answer": " four"}, {"text": "[two and two]", "answer": " five"}]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: "%(folder)s/%(task)s.jsonl"}}
test_split: test
doc_to_text: "{{text}}"
num_fewshot: 0
task: %(task)s
"""
CHOICE_TASK = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
SUM_TASK = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 32}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


@cache
def results() -> dict[str, Any]:
    """By the task."""
    folder = Path.cwd()
    for task, body, docs in (("ours_choices", CHOICE_TASK, CHOICES), ("ours_sums", SUM_TASK, SUMS)):
        (folder / f"{task}.yaml").write_text(COMMON % {"folder": folder, "task": task} + body)
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    options = {
        "model": MODEL,
        "base_url": f"{base_url()}/completions",
        "tokenizer": model_dir(),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": CONTEXT,
    }
    arguments = ["--model", "local-completions", "--model_args", ",".join(f"{k}={v}" for k, v in options.items())]
    arguments += ["--tasks", "ours_choices,ours_sums", "--include_path", str(folder), "--output_path", "out"]
    program("lm_eval", *arguments, folder=folder)
    (path,) = folder.glob("out/**/results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    return found


def case_multiple_choice() -> None:
    """The likelier answer is the one that the model gives: three of four are right."""
    assert results()["ours_choices"]["acc,none"] == 0.75


def case_generate_until() -> None:
    """The answer ends before the stop string: one of two is right."""
    assert results()["ours_sums"]["exact_match,none"] == 0.5


if __name__ == "__main__":
    run(globals())
