"""Refreshes on real models with quantised pages: nothing but the interval decides what comes out, what the pages hold
afterwards, and that nobody else's change.

Linear layers compute row by row here, so that these tests hold on every CPU.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
import tiny_models
import torch
from engines import DTYPES, Completion, Engine, Loaded
from exact_ways import WAYS, Requests, alone, assert_equal
from packed import by_row

from configs.kv import KVFormat, KVLayout
from configs.kv_flags import PLAIN
from configs.refresh import scratch, scratch_bytes
from engine.messages import StepPlan
from engine.runner.attention.paged import PagedAttention
from engine.runner.kv_store import PagedStore, allocate_pool
from engine.runner.solo import Solo
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.reference.pages import gather_kv

pytestmark = pytest.mark.filterwarnings("ignore:no native kernels:RuntimeWarning")  # torch code serves as well

INTERVAL, SIZE = 8, 16
INT8 = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("none",), "kv_refresh_interval": INTERVAL}
GREEDY = SamplingParams(temperature=0.0, max_tokens=2 * INTERVAL + 7, ignore_eos=True, logprobs=3)
PROMPTS = [random.Random(length).choices(range(256), k=length) for length in (45, 21, 30)]
REQUESTS = Requests.of((3, 16, 31, 75), range(256), few_blocks=12)


@pytest.fixture(scope="module", autouse=True)
def linear_row_by_row():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "linear", by_row)
        yield


Load = Callable[..., Loaded]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tiny model by its name, and settings of its cache."""
    found: dict[tuple[str, torch.dtype], Loaded] = {}

    def build(name: str = "gqa", dtype: torch.dtype = torch.float32, **kv: object) -> Loaded:
        if (name, dtype) not in found:
            tiny = {**tiny_models.VARIANTS, **tiny_models.FALLBACKS}[name]
            found[name, dtype] = Loaded.load(tiny_models.build(tmp_path_factory.mktemp(name), tiny), dtype, 256)
        return replace(found[name, dtype], kv={**INT8, **kv})

    return build


class Watched:
    """An engine, and the logits of every row that it samples, by request."""

    def __init__(self, loaded: Loaded, **options: int) -> None:
        self.engine = Engine(loaded, **options)
        self.scheduler = self.engine.core.scheduler
        self.logits: dict[str, list[torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._forward = self.engine.executor.forward
        self.engine.executor.forward = self.forward

    def forward(self, plan: StepPlan) -> object:
        handle = self._forward(plan)
        self._names.update({row.slot: row.request_id for row in plan.new_rows})
        for place, slot in enumerate(handle.slots.tolist()):
            self.logits.setdefault(self._names[slot], []).append(handle.logits[place].clone())
        return handle

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[torch.Tensor]:
        """Logits [tokens, vocab] of each prompt's answer; all together."""
        ids = [i for prompt in prompts for i in self.engine.add(prompt, params)]
        self.engine.drain({})
        return [torch.stack(self.logits[i]) for i in ids]

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.engine.step({})
        raise AssertionError("it never came to that")


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ------------------------------------------------------------------ the same bits
FORMATS = {
    "int8": {},
    "int4": {"kv_cache_dtype": "int4"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "bf16 and int8": {"kv_cache_dtype": "bf16", "kv_cache_dtype_v": "int8", "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("formats", FORMATS)
def test_alone_in_company_in_chunks_and_preempted(load: Load, formats: str) -> None:
    kv = dict(FORMATS[formats])
    loaded = load("head-dim", kv.pop("dtype", torch.float32), **kv)
    expected = [Watched(loaded).run([prompt])[0] for prompt in PROMPTS]
    without = Watched(replace(loaded, kv={**loaded.kv, "kv_refresh_interval": None})).run(PROMPTS)
    assert not any(map(torch.equal, without, expected))
    for options in ({}, {"chunk": 7}, {"block_size": 8, "chunk": 33}, {"block_size": 8, "num_blocks": 14, "chunk": 16}):
        watched = Watched(loaded, **options)
        assert_same(watched.run(PROMPTS), expected)
        stats = watched.engine.core.stats()
        assert stats.refreshes_total == 2 * len(PROMPTS)
        assert bool(stats.preemptions_total) == ("num_blocks" in options)


@pytest.mark.parametrize("way", ["among 32 others", "no prefix cache", "partial hits", "preempted", "one thread"])
def test_every_way(load: Load, expected: list[Completion], way: str) -> None:
    assert_equal(WAYS[way](load(), REQUESTS), expected)


@pytest.fixture(scope="module")
def expected(load: Load) -> list[Completion]:
    return alone(load(), REQUESTS)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("skipped", [("none",), ()], ids=["all layers", "no windows"])
def test_windows_soft_caps_and_sinks(load: Load, name: str, skipped: tuple[str, ...]) -> None:
    loaded = load(name, kv_cache_dtype_skip_layers=skipped)
    expected = [Watched(loaded, block_size=8).run([prompt])[0] for prompt in PROMPTS]
    for options in ({"chunk": 16}, {"chunk": 7, "num_extents": 30}):
        assert_same(Watched(loaded, block_size=8, **options).run(PROMPTS), expected)


def test_results_that_come_a_step_late(load: Load) -> None:
    expected = [Watched(load()).run([prompt])[0] for prompt in PROMPTS]
    watched = Watched(load(), chunk=16)
    watched.engine.core._depth = 2
    found = watched.run(PROMPTS)
    assert_same(found, expected)


def test_preempted_amid_a_refresh(load: Load) -> None:
    expected = [Watched(load()).run([prompt])[0] for prompt in PROMPTS[:2]]
    watched = Watched(load(), chunk=16)
    ids = [i for prompt in PROMPTS[:2] for i in watched.engine.add(prompt, GREEDY)]
    for _ in range(3):
        watched.until(lambda: watched.scheduler.refreshes.current is not None)
        watched.scheduler._preempt(watched.scheduler.refreshes.current, watched.scheduler.refreshes.current)
        watched.engine.step({})
    watched.engine.drain({})
    assert_same([torch.stack(watched.logits[i]) for i in ids], expected)


def test_stale_memory_changes_no_bit(load: Load) -> None:
    """Whatever pages and scratch held before, NaN too, is never seen."""
    expected = [Watched(load()).run([prompt])[0] for prompt in PROMPTS]
    watched = Watched(load(), chunk=16)
    runner = watched.engine.executor.runner
    for pool in (*runner.pools, runner.refresh.pool):
        pool.fill_(255)
    assert_same(watched.run(PROMPTS), expected)


def test_an_interval_that_is_never_reached_changes_nothing(load: Load) -> None:
    plain = Watched(load(kv_refresh_interval=None)).run(PROMPTS)
    assert_same(Watched(load(kv_refresh_interval=GREEDY.max_tokens)).run(PROMPTS), plain)


# ------------------------------------------------------------------ what pages hold
Halves = list[tuple[torch.Tensor, torch.Tensor | None]]


def contents(store: PagedStore, tables: list[list[int]], starts: list[int], end: int) -> Halves:
    """(numbers, scales) of K and V of all layers, as they are stored. tables, starts: by KV group."""
    found: Halves = []
    for group, pages in zip(store.groups, store.pages, strict=True):
        pasts = gather_kv(pages, torch.tensor(tables[group]), starts[group], end, torch.float32)
        found += [(past.numbers, past.scales) for past in pasts]
    return found


def quantised_once(loaded: Loaded, layout: KVLayout, token_ids: list[int], starts: list[int]) -> Halves:
    """What pages would hold that are written from K and V of a prefill in full precision, which goes through pages of
    the model's own format."""
    plain = PLAIN[DTYPES[loaded.dtype]]
    solo = Solo(loaded.model, loaded.config.kv_layers(plain), len(token_ids), loaded.device)
    solo.hidden(token_ids)
    assert isinstance(solo.attention, PagedAttention)
    tables = [list(range(solo.num_pages))] * len(starts)
    full = contents(solo.attention.store, tables, [0] * len(starts), len(token_ids))
    pools = [allocate_pool(solo.num_pages, group.spec.block_bytes, loaded.device) for group in layout.groups]
    store = PagedStore(pools, layout, loaded.transforms)
    for layer, pages in enumerate(store.pages):
        k, v = (full[2 * layer + half][0].transpose(0, 1).contiguous().to(loaded.dtype) for half in (0, 1))
        ops.store_kv(k, v, pages, torch.arange(len(token_ids)))
    return contents(store, tables, starts, len(token_ids))


def equal(one: Halves, other: Halves) -> bool:
    return all(
        torch.equal(a, b) and (c is None if d is None else c is not None and torch.equal(c, d))
        for (a, c), (b, d) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "dtype", "kv_format"),
    [
        ("gqa", torch.float32, "int8"),
        ("gqa", torch.bfloat16, "int8"),
        ("gqa", torch.float32, "fp8"),
        ("gemma2", torch.float32, "int8"),
        ("gemma3", torch.float32, "fp8"),
        ("gpt_oss", torch.float32, "int8"),
    ],
)
def test_pages_hold_what_a_prefill_in_full_precision_computes(
    load: Load, name: str, dtype: torch.dtype, kv_format: str
) -> None:
    """As far back as windows reach."""
    loaded = load(name, dtype, kv_cache_dtype=kv_format)
    watched = Watched(loaded, chunk=16)
    request_id, *_ = watched.engine.add(PROMPTS[0], GREEDY)
    watched.engine.add(PROMPTS[1], GREEDY)
    request, kv = watched.scheduler.requests[request_id], watched.scheduler.kv
    store, layout = watched.engine.executor.runner.attention.store, KVLayout.of(loaded.kv_layers, SIZE)
    for k in (1, 2):
        due = len(PROMPTS[0]) + k * INTERVAL - 1
        watched.until(lambda due=due: len(request.token_ids) == due)
        tables, starts = kv.table_ids(request), [0, *(start * SIZE for start in request.window_starts)]
        before = contents(store, tables, starts, due - 1)
        watched.until(lambda due=due: request.num_refreshed == due == request.num_confirmed)
        tables, starts = kv.table_ids(request), [0, *(start * SIZE for start in request.window_starts)]
        once = quantised_once(loaded, layout, request.token_ids[:due], starts)
        assert equal(contents(store, tables, starts, due), once)
        assert not equal(contents(store, tables, starts, due - 1), before), "errors had built up"


def test_pages_of_others_stay_as_they_are_byte_by_byte(load: Load) -> None:
    """Another reads the same prompt, and what was generated before the first refresh."""
    watched = Watched(load(), chunk=32)
    first, *_ = watched.engine.add(PROMPTS[0], GREEDY)
    request = watched.scheduler.requests[first]
    watched.until(lambda: len(request.token_ids) == len(PROMPTS[0]) + INTERVAL - 1)
    watched.engine.add(request.token_ids, msgspec.structs.replace(GREEDY, max_tokens=INTERVAL - 1))
    pool, blocks = watched.engine.executor.runner.pools[0], watched.scheduler.kv.pool.blocks

    def published() -> dict[int, tuple[tuple[int, ...], torch.Tensor]]:
        whole = (block for block in blocks if len(block.tokens) == SIZE)
        return {block.id: (block.tokens, pool[block.id].clone()) for block in whole}

    watched.until(lambda: request.num_refreshed > 0)
    before = published()
    assert len(before) >= len(PROMPTS[0]) // SIZE
    watched.until(lambda: request.num_computed > request.num_refreshed)
    assert not set(request.block_ids) & before.keys()
    watched.engine.drain({})
    after = published()
    assert before.keys() <= after.keys()
    for block_id, (tokens, page) in before.items():
        assert after[block_id][0] == tokens and torch.equal(after[block_id][1], page)
    assert watched.engine.core.stats().refreshes_total == 2


# ------------------------------------------------------------------ the scratch
def test_only_layers_that_are_quantised_take_room_in_the_scratch(load: Load) -> None:
    sizes = {}
    for skipped in (("none",), ()):
        loaded = load("gemma3", kv_cache_dtype_skip_layers=skipped)
        runner = Engine(loaded, block_size=8).executor.runner
        layout = KVLayout.of(loaded.kv_layers, 8)
        assert runner.refresh.pool.nbytes == scratch_bytes(layout, KVFormat.FP32, 256)
        sizes[skipped] = runner.refresh.pool.nbytes
        assert scratch(layout, KVFormat.FP32).layers == ((2,) if skipped == () else (0, 1, 2))
    assert 0 < sizes[()] < sizes["none",]


def test_there_is_no_scratch_without_the_interval(load: Load) -> None:
    assert Engine(load(kv_refresh_interval=None)).executor.runner.refresh is None


def test_rows_of_some_slots() -> None:
    plan = StepPlan(
        step=3,
        slots=[4, 1, 7],
        num_tokens=[1, 5, 6],
        samples=[True, False, True],
        new_rows=[],
        new_blocks=[],
        copies=[],
        transfers=[],
        freed_slots=[],
        scored_slots=[7],
        refreshed_slots=[1],
    )
    rest, part = plan.rows_of({4, 7}), plan.rows_of([1])
    assert (rest.slots, rest.num_tokens, rest.samples) == ([4, 7], [1, 6], [True, True])
    assert (rest.scored_slots, rest.refreshed_slots) == ([7], [])
    assert (part.slots, part.num_tokens, part.samples, part.scored_slots) == ([1], [5], [False], [])
    assert part.refreshed_slots == [1] and part.step == 3 and plan.total_tokens == 12
