"""The whole engine, in this process, on a model of random weights: tokens a second, and how long the GPU waits for the
host.

The workload is nano-vllm's: 256 requests, prompts and answers of 100 to 1,024 tokens, all at once; without CUDA graphs
fewer, as each step takes longer. Whether tokens are right is the section `engine`'s question.
"""

import time
from collections.abc import Sequence

import torch
from gpu.bench import Bench
from gpu.engines import MODES, add, engine, requests, serve

from engine.core.loop import EngineCore

TARGET, BEST = 12000, 22000
"""Output tokens a second, on an H200, of the crowd."""
CROWD, EAGER = 256, 64
"""Requests, and without CUDA graphs."""


def run(bench: Bench) -> None:
    for mode in MODES:
        with bench.findings.case(mode), engine(bench, mode) as core:
            throughput(bench, core, mode)
            host(bench, core, mode)


# ------------------------------------------------------------------ speed
def throughput(bench: Bench, core: EngineCore, mode: str) -> None:
    count = EAGER if "enforce_eager" in MODES[mode] else CROWD
    asked = requests(bench, *((4, 5, 20) if bench.is_tiny else (count, 100, 1024)), temperature=0.6)
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
    if count == CROWD:
        text += bench.aim(f"{TARGET:,}, at best {BEST:,}", rate >= TARGET)
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
    add(core, requests(bench, count, 5, 8, max_tokens=3 * steps, temperature=0.6))
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
