"""Whole engines in this process, as the server builds them, on a model of random weights.

What is compiled for one is found by the next: sizes of steps and of tables are the same in all of them.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from gpu.bench import Bench
from gpu.random_model import QWEN3_06B, TINY, write
from gpu.turns import native_kernels

from engine.build import build_core
from engine.core.loop import EngineCore
from engine.messages import AddRequest, Launch
from engine.sampling_params import SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "with CUDA graphs": {},
    "--enforce-eager": {"enforce_eager": True},
    "--batch-invariant": {"batch_invariant": True},
}
"""Name -> settings"""
SIZES = {"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16384}
TINY_SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 80}
TOLD = ("attention", "linear", "CUDA graphs", "KV pool", "answers")
"""Lines of the start-up block that belong to what is found."""


@contextmanager
def engine(bench: Bench, mode: str, **settings: Any) -> Iterator[EngineCore]:
    """One of MODES, with `settings` besides. The one before must be gone: it may have had nearly all of the memory."""
    shape = TINY if bench.is_tiny else QWEN3_06B
    folder = str(write(bench.scratch / "model", shape, bench.device))
    native_kernels(bench.scratch)
    gc.collect()
    if not bench.is_tiny:
        torch.cuda.empty_cache()
    sizes = TINY_SIZES | {"device": "cpu", "dtype": "float32"} if bench.is_tiny else SIZES
    asked = {"model": folder, "num_threads": 1} | settings | sizes | MODES[mode]
    start = time.perf_counter()
    core, ready = build_core(Launch(folder, "random", asked, ()), lambda loading: None)
    try:
        bench.findings.figure(f"{mode}, start", f"{time.perf_counter() - start:.1f} s")
        for line in TOLD:
            if line in ready.summary:
                bench.findings.figure(f"  {line}", ready.summary[line])
        yield core
    finally:
        core.shutdown()


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams


def requests(bench: Bench, count: int, shortest: int, longest: int, **params: Any) -> list[Request]:
    """The same at every call."""
    random, vocab = Random(0), (TINY if bench.is_tiny else QWEN3_06B).vocab
    return [
        Request(
            [random.randrange(vocab) for _ in range(random.randint(shortest, longest))],
            SamplingParams(**{"max_tokens": random.randint(shortest, longest), "ignore_eos": True, "seed": i} | params),
        )
        for i in range(count)
    ]


def add(core: EngineCore, asked: Sequence[Request]) -> list[str]:
    """Their names."""
    names = [str(number) for number in range(len(asked))]
    for name, request in zip(names, asked, strict=True):
        core.add(
            AddRequest(
                request_id=name, prompt_token_ids=request.prompt, params=request.params, arrival=time.monotonic()
            )
        )
    return names


def serve(core: EngineCore, asked: Sequence[Request]) -> list[list[int]]:
    """All at once; the tokens of each."""
    tokens: dict[str, list[int]] = {name: [] for name in add(core, asked)}
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())
