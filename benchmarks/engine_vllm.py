"""vLLM's side of benchmarks/engine.py, run by the interpreter of vLLM's own environment; see `serve`."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path

sys.path.insert(0, os.environ["BENCHMARK_ROOT"])

from benchmarks.engine_cases import Steps, load_of, serve, write_config


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    model, folder = sys.argv[1], Path(sys.argv[2])
    load = load_of(model, sys.argv[3])
    llm = LLM(
        model=str(write_config(folder, model)),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=load.peer_tokens_per_step,
        enable_prefix_caching=load.shared,
        block_size=32 if load.shared else None,  # it keeps whole blocks, and its own of 128 are longer than a context
        disable_log_stats=True,
    )

    numbers = count()

    def generate(prompts: list[list[int]], tokens: int) -> Steps:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        for prompt in prompts:
            llm.llm_engine.add_request(f"r{next(numbers)}", {"prompt_token_ids": prompt}, params)
        steps: Steps = []
        while llm.llm_engine.has_unfinished_requests():
            answers = len(llm.llm_engine.step())
            steps.append((time.perf_counter() - started, answers))
        return steps

    serve(model, load, generate)


if __name__ == "__main__":
    main()
