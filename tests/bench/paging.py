"""What paging brings and what it costs: python tests/bench/paging.py {trace,kernel,prefix} MODEL

    trace   the same requests with pages of 16 tokens, and with one page for each sequence that is as long as the
            longest one may be: a reservation of the maximum, in contiguous memory. Everything else is the same code.
            First with the model; then as a loss system, in steps, where who finds no room on arrival is refused.
    kernel  attention over pages of 16 tokens in random places, and over pages of 128, the largest, that lie side by
            side in the order of the tokens. Alternating; medians.
    prefix  requests behind one prefix as long as the window allows, one after another: time to the first token with the
            prefix cache and without.

MODEL: a folder or a GGUF file that fits in bf16.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.host_loop import NullExecutor
from engines import Completion, Engine, Loaded
from paged import make_paged

from configs.limits import SchedulerLimits
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.messages import AddRequest, CacheInfo
from engine.ports import NoGrammar
from engine.sampling_params import SamplingParams

WINDOW = 2048
PAGE, LARGEST_PAGE = 16, 128
POOL_TOKENS = 16384
PROMPT_MEAN, OUTPUT_MEAN = 161, 338
"""Of ShareGPT's conversations, as the paper on PagedAttention (arXiv 2309.06180) gives them."""


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens: log-normal, of those means, inside the window."""
    draw = random.Random(seed)

    def length(mean: float, sigma: float) -> int:
        return max(1, round(draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))

    pairs = ((min(length(PROMPT_MEAN, 1.0), WINDOW // 2), length(OUTPUT_MEAN, 0.8)) for _ in range(count))
    return [(prompt, min(output, WINDOW - prompt)) for prompt, output in pairs]


@dataclass
class Observed:
    running: list[int]
    useful: list[float]
    """Tokens stored, by token slots of the pages in use; a step each."""

    def line(self) -> str:
        return (
            f"{statistics.mean(self.running):6.1f} running on average, at most {max(self.running)}; "
            f"useful {100 * statistics.mean(self.useful):5.1f} % of reserved memory"
        )


def watch(core: EngineCore, page: int, step: Callable[[], object]) -> Observed:
    seen = Observed([], [])
    while core.has_work:
        step()
        stats = core.stats()
        if stats.pages_active:
            seen.running.append(stats.running)
            seen.useful.append(stats.tokens_stored / (stats.pages_active * page))
    return seen


def trace(model: Path, count: int = 48) -> None:
    requests = lengths(count, seed=1)
    tokens = sum(output for _, output in requests)
    loaded = Loaded.load(model, torch.bfloat16, WINDOW)
    for name, page in (("paged", PAGE), ("contiguous", WINDOW)) * 2:
        engine = Engine(
            loaded, num_blocks=POOL_TOKENS // page, block_size=page, max_num_seqs=count, prefix_caching=False
        )
        draw = random.Random(2)
        for prompt, output in requests:
            ids = [draw.randrange(3, 40000) for _ in range(prompt)]
            engine.add(ids, SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True))
        results: dict[str, Completion] = {}
        begin = time.perf_counter()
        seen = watch(engine.core, page, partial(engine.step, results))
        seconds = time.perf_counter() - begin
        preempted = sum(engine.core.stats().preemptions_total.values())
        print(f"{name:10} {tokens / seconds:7.1f} output tokens/s in {seconds:.1f} s; {seen.line()}; "
              f"{preempted} preempted")  # fmt: skip
    for name, page in (("paged", PAGE), ("contiguous", WINDOW)):
        refused, seen = loss_system(page, lengths(2000, seed=3))
        print(f"{name:10} {refused} of 2000 find no room on arrival; {seen.line()}")


def loss_system(page: int, requests: list[tuple[int, int]], every: int = 40) -> tuple[int, Observed]:
    """A request every so many steps on average; who is not admitted at once goes away. No model: tokens cost steps."""
    kv = KVManager(POOL_TOKENS // page, page, enable_prefix_caching=False)
    limits = SchedulerLimits(max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=WINDOW)
    cache = CacheInfo(POOL_TOKENS // page, page, 4096, 256, "bf16", WINDOW, False)
    core = EngineCore(Scheduler(limits, kv), NullExecutor(), NoGrammar(), cache)
    draw = random.Random(4)
    waiting = iter(requests)
    refused, seen, following = 0, Observed([], []), next(waiting, None)
    while following is not None or core.has_work:
        new = None
        if following is not None and draw.random() < 1 / every:
            prompt, output = following
            following, new = next(waiting, None), f"r{id(following)}-{len(seen.running)}"
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            core.add(AddRequest(request_id=new, prompt_token_ids=[5] * prompt, params=params, arrival=0.0))
        if not core.has_work:
            continue
        core.step()
        stats = core.stats()
        if new is not None and stats.waiting:
            core.abort([new], "abort")
            refused += 1
        if stats.pages_active:
            seen.running.append(stats.running)
            seen.useful.append(stats.tokens_stored / (stats.pages_active * page))
    return refused, seen


def kernel() -> None:
    """SmolLM2's shape. Eight sequences in turn, so that K and V come from memory as they do in a model's layers."""
    from kernels import ops

    for rows, context in ((1, 512), (1, 2048), (1, 8192), (512, 2048), (512, 8192)):
        cases = {
            page: make_paged([context] * 8, kv_heads=3, block_size=page, shuffled=page == PAGE)
            for page in (PAGE, LARGEST_PAGE)
        }
        times: dict[int, list[float]] = {page: [] for page in cases}
        for turn in range(64):
            for page, case in cases.items():
                begin = time.perf_counter()
                case.attend(ops.paged_attention, [(turn % 8, context - rows, context)])
                times[page].append(time.perf_counter() - begin)
        paged, whole = (statistics.median(times[page]) for page in cases)
        print(f"{rows:4} rows, context {context:5}: pages {1e6 * paged:8.1f} us, contiguous {1e6 * whole:8.1f} us, "
              f"{100 * (paged / whole - 1):+.1f} %")  # fmt: skip


def prefix(model: Path, count: int = 100, without: int = 5) -> None:
    window = 8192
    loaded = Loaded.load(model, torch.bfloat16, window)
    draw = random.Random(5)
    shared = [draw.randrange(3, 40000) for _ in range(window - 64)]
    for caching, requests in ((True, count), (False, without)):
        engine = Engine(loaded, num_blocks=2 * window // PAGE, prefix_caching=caching)
        firsts = []
        for _ in range(requests):
            ids = shared + [draw.randrange(3, 40000) for _ in range(32)]
            begin = time.perf_counter()
            engine.add(ids, SamplingParams(temperature=0.0, max_tokens=1))
            engine.drain({})
            firsts.append(time.perf_counter() - begin)
        print(f"prefix of {len(shared)} tokens, cache {'on' if caching else 'off'}: first request {firsts[0]:.2f} s, "
              f"the {requests - 1} others: median {statistics.median(firsts[1:]):.3f} s")  # fmt: skip


if __name__ == "__main__":
    what, model = sys.argv[1], Path(sys.argv[2])
    if what == "kernel":
        kernel()
    else:
        {"trace": trace, "prefix": prefix}[what](model)
