"""The whole engine, in this process, on a model of random weights: tokens a second, how long the GPU waits for the
host, and whether a request's tokens are the same alone and in company.

The workload is nano-vllm's: 256 requests, prompts and answers of 100 to 1,024 tokens, all at once.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from gpu.bench import Bench
from gpu.random_model import QWEN3_06B, TINY, write

from engine.build import build_core
from engine.core.loop import EngineCore
from engine.messages import AddRequest, Launch
from engine.sampling_params import SamplingParams

TARGET, AIM = 12000, 22000
"""Output tokens a second, on an H200."""
TOLD = ("attention", "linear", "CUDA graphs", "KV pool", "answers")
"""Lines of the start-up block that belong to the figures."""
MODES: dict[str, dict[str, Any]] = {
    "with CUDA graphs": {},
    "--enforce-eager": {"enforce_eager": True},
    "--batch-invariant": {"batch_invariant": True},
}


def run(bench: Bench) -> None:
    folder = write(bench.scratch / "model", TINY if bench.is_tiny else QWEN3_06B, bench.device)
    for mode, settings in MODES.items():
        with bench.findings.case(mode):
            measure(bench, folder, mode, settings)


def measure(bench: Bench, folder: Path, mode: str, settings: dict[str, Any]) -> None:
    with engine(bench, folder, mode, settings) as core:
        throughput(bench, core, mode)
        host(bench, core, mode)
        if "enforce_eager" not in settings:
            exactness(bench, core, mode, must_be=bench.is_tiny or "batch_invariant" in settings)


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


# ------------------------------------------------------------------ engines
@contextmanager
def engine(bench: Bench, folder: Path, mode: str | None, settings: dict[str, Any]) -> Iterator[EngineCore]:
    """As the server builds it. mode: under which name it is told of; None: it is not. The one before must be gone: it
    had nearly all of the memory."""
    gc.collect()
    if not bench.is_tiny:
        torch.cuda.empty_cache()
    common: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16384}
    if bench.is_tiny:
        common = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 80, "device": "cpu"}
        common |= {"dtype": "float32"}
    start = time.perf_counter()
    asked = common | {"num_threads": 1, "model": str(folder)} | settings
    core, ready = build_core(Launch(str(folder), "random", asked, ()), lambda loading: None)
    try:
        if mode is not None:
            bench.findings.figure(f"{mode}, start", f"{time.perf_counter() - start:.1f} s")
            for line in TOLD:
                if line in ready.summary:
                    bench.findings.figure(f"  {line}", ready.summary[line])
        yield core
    finally:
        core.shutdown()


def serve(core: EngineCore, asked: Sequence[Request]) -> list[list[int]]:
    """All at once; the tokens of each."""
    tokens: dict[str, list[int]] = {}
    for number, request in enumerate(asked):
        name = str(number)
        tokens[name] = []
        core.add(
            AddRequest(
                request_id=name, prompt_token_ids=request.prompt, params=request.params, arrival=time.monotonic()
            )
        )
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())


# ------------------------------------------------------------------ speed
def throughput(bench: Bench, core: EngineCore, mode: str) -> None:
    asked = requests(bench, *((4, 5, 20) if bench.is_tiny else (256, 100, 1024)), temperature=0.6)
    serve(core, requests(bench, 2, 5, 8))  # what compiles at the first use has compiled
    core.reset_prefix_cache()
    bench.wait()
    before, start = core.stats(), time.perf_counter()
    answers = serve(core, asked)
    bench.wait()
    seconds = time.perf_counter() - start
    prompt, output = sum(len(each.prompt) for each in asked), sum(map(len, answers))
    bench.findings.verdict(
        f"{mode}, every token", [len(each) for each in answers] == [each.params.max_tokens for each in asked]
    )
    rate = output / seconds
    text = (
        f"{rate:,.0f} output tokens/s, {(prompt + output) / seconds:,.0f} with prompts; {output:,} in {seconds:.1f} s"
    )
    if not bench.is_tiny:
        text += f" (target {TARGET:,}{'' if rate >= TARGET else ': MISSED'}, aim {AIM:,})"
    bench.findings.figure(f"{mode}, {len(asked)} requests", text, output_tokens_a_second=rate, seconds=seconds)
    after = core.stats()
    shares = {
        name: (getattr(after, f"{name}_seconds_total") - getattr(before, f"{name}_seconds_total")) / seconds
        for name in ("schedule", "execute", "update")
    }
    words = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    bench.findings.figure("  of that time the host's steps took", words, **shares)


def host(bench: Bench, core: EngineCore, mode: str) -> None:
    """The GPU's time line over some steps that only decode."""
    count, steps = (2, 3) if bench.is_tiny else (64, 30)
    asked, start = requests(bench, count, 5, 8, max_tokens=3 * steps, temperature=0.6), time.monotonic()
    for number, request in enumerate(asked):
        core.add(
            AddRequest(
                request_id=f"host-{number}", prompt_token_ids=request.prompt, params=request.params, arrival=start
            )
        )
    for _ in range(steps):
        core.step()
    bench.wait()
    start = time.perf_counter()
    for _ in range(steps):
        core.step()
    bench.wait()
    wall = (time.perf_counter() - start) / steps
    text = f"{wall * 1e6:9.1f} us a step"
    if not bench.is_tiny:
        text += f"; {timeline(core, steps // 2)}"
    bench.findings.figure(f"{mode}, {count} sequences decode", text, seconds_a_step=wall)
    while core.has_work:
        core.step()


def timeline(core: EngineCore, steps: int) -> str:
    """What the profiler saw of the GPU, in words."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            core.step()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    if not on_gpu:
        return "the profiler saw nothing of the GPU"
    busy, span = covered([(event.time_range.start, event.time_range.end) for event in on_gpu])
    idle = f"{(span - busy) / steps:.0f} us of {span / steps:.0f} ({1 - busy / span:.1%})"
    return f"the GPU idles for {idle}, {len(on_gpu) // steps} kernels"


def covered(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(how much of the line they cover, from the first start to the last end)"""
    busy, end = 0.0, float("-inf")
    for first, last in sorted(ranges):
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return busy, end - min(first for first, _ in ranges)


# ------------------------------------------------------------------ exactness
def exactness(bench: Bench, core: EngineCore, mode: str, must_be: bool) -> None:
    """Linear layers are exact on a CPU, on a GPU with the flag. torch's there may give a row other bits in other
    company: it is told how often that shows."""
    asked = requests(bench, *((3, 5, 20) if bench.is_tiny else (16, 20, 300)), max_tokens=12 if bench.is_tiny else 48)
    found = []
    for ways in (
        lambda: [serve(core, [each])[0] for each in asked],
        lambda: serve(core, asked),
        lambda: serve(core, asked),
    ):
        core.reset_prefix_cache()
        found.append(ways())
    alone, together, again = found
    cached = serve(core, asked)
    bench.findings.verdict(f"{mode}, the same requests twice", together == again)
    for what, other in (("alone and in company", together), ("computed and from cached pages", cached)):
        same = sum(ours == theirs for ours, theirs in zip(alone, other, strict=True))
        text = f"{same} of {len(asked)} requests have the same {len(alone[0])} tokens"
        if must_be:
            bench.findings.verdict(f"{mode}, {what}", same == len(asked), text)
        else:
            bench.findings.figure(f"{mode}, {what}", text, same=same, requests=len(asked))
