"""flash-attn where the host runs ahead of a device: each request gets the tokens that it gets alone by the reference,
in steps that were launched and in captured ones, from cached pages and after preemptions. The library is
`flash_library`'s, which notices arguments that were right only when a step was captured."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import static_kernels
import tiny_models
import torch
from engines import Loaded
from flash_library import FlashLibrary, on_a_gpu
from late_device import LateDevice
from random_days import GREEDY, Alone, Poisoned, ahead, collect, finish, live
from tiny_models import VARIANTS

from configs.graphs import decode_sizes
from configs.kv import KVFormat
from engine.messages import StepPlan
from engine.runner.ahead import AheadExecutor, AheadHandle
from engine.sampling_params import SamplingParams
from kernels import flash, ops
from kernels.registry import choose

LONGEST = 384
"""Tokens of a sequence: two pages of flash-attn 2."""
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with static_kernels.served():
        yield


def load(folder, variant: str, longest: int) -> Loaded:
    plain = Loaded.load(tiny_models.build(folder, VARIANTS[variant]), torch.bfloat16, longest)
    return replace(plain, model=Poisoned(plain.model))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Loaded:
    return load(tmp_path_factory.mktemp("tiny"), "gqa", LONGEST)


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> Alone:
    return Alone(loaded)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashLibrary]:
    with on_a_gpu(monkeypatch) as library:
        yield library


def serve(library: FlashLibrary, release: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That release, wherever flash-attn is named."""
    library.install(monkeypatch, release)
    kernel = choose("paged_attention", "cuda", torch.bfloat16, (KVFormat.BF16,) * 2, flash.BACKEND).function
    others, own = ops._serve, SimpleNamespace(function=static_kernels.paged_attention)
    monkeypatch.setattr(ops, "_serve", lambda op, *where: kernel if flash.BACKEND in where else others(op, *where))
    monkeypatch.setattr(flash, "choose", lambda *asked: own)


def padding(executor: AheadExecutor) -> Counter[int]:
    """Of the captured steps from now on: by how many sequences each is padded."""
    seen: Counter[int] = Counter()
    forward = executor.forward

    def counting(plan: StepPlan) -> AheadHandle:
        size = executor.graphs.size_for(plan) if plan.slots else None
        seen.update([size - len(plan.slots)] if size else [])
        return forward(plan)

    executor.forward = counting
    return seen


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize(
    ("release", "asks", "page", "decodes_by"),
    [
        (3, False, 16, {"with_kvcache"}),
        (2, False, 16, set()),
        (2, False, flash.PAGE, {"with_kvcache"}),
        (2, True, flash.PAGE, {"varlen"}),
    ],
    ids=["3", "2, small pages", "2", "2.8.4"],
)
def test_tokens_are_those_of_the_reference(
    release, asks, page, decodes_by, graphs, loaded: Loaded, alone: Alone, library: FlashLibrary, monkeypatch
) -> None:
    library.asks = asks
    serve(library, release, monkeypatch)
    options = {"max_num_seqs": 5, "block_size": page, "chunk": 128, "backend": flash.BACKEND}
    engine = ahead(loaded, LateDevice(7), graphs=False, **options)
    engine.executor.link.catch_up()
    assert library.calls, "to warm up"
    library.calls.clear()
    if graphs:
        engine.executor.capture(decode_sizes(5))
        assert {name for name, _ in library.calls} == decodes_by
    pads = padding(engine.executor)
    stem = [(7 * i + 40) % 250 for i in range(page + 9)]
    prompts = [[*stem, 1], [*stem, 2, 3], stem[:5], [9], [(11 * i) % 250 for i in range(LONGEST - 6)]]
    asked, answers = {}, {}
    for prompt, params in zip(prompts, [GREEDY, SEEDED, GREEDY, SEEDED, GREEDY], strict=True):
        [name] = engine.add(prompt, params)
        asked[name] = prompt, params
        for _ in range(2):  # the first one's pages are known when the second comes
            collect(engine, answers)
    victim = engine.core.scheduler.running.items[-1]
    engine.core.scheduler._preempt(victim, victim)
    finish(engine, answers)
    for name, (prompt, params) in asked.items():
        assert answers[name].token_ids == alone.expected(prompt, params), prompt
    assert engine.core.stats().prefix_hits_total and engine.preemptions
    assert bool(pads[0] and sum(pads.values()) > pads[0]) == graphs, "some were padded"


@pytest.mark.parametrize(("release", "page"), [(3, 8), (2, 16)])
def test_on_random_days(release, page, loaded: Loaded, alone: Alone, library: FlashLibrary, monkeypatch) -> None:
    serve(library, release, monkeypatch)
    seen = live(loaded, alone, range(3), block_size=page, backend=flash.BACKEND)
    assert all(seen[name] for name in ("finished", "hits", "preemptions", "replays", "resumed", "copies")), seen


@pytest.mark.parametrize(("release", "page"), [(3, 8), (2, flash.PAGE)])
def test_windows(release, page, library: FlashLibrary, monkeypatch, tmp_path) -> None:
    """Two KV groups; what lies before a window is no page any more."""
    serve(library, release, monkeypatch)
    gemma = load(tmp_path, "gemma3", 128)
    expected = Alone(gemma)
    prompts = [[*range(40, 120)], [*range(40, 110), 3], [7]]
    engine = ahead(gemma, LateDevice(3), block_size=page, chunk=64, backend=flash.BACKEND)
    found = engine.run(prompts, GREEDY)
    assert [one.token_ids for one in found] == [expected.expected(prompt) for prompt in prompts]
    assert engine.executor.link.num_replays
