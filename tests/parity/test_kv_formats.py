"""Every format of the KV cache: answers are the same bit for bit as the same format's without company, forks, hits,
preemption, chunks and other page sizes; and so are codes and scales in the pages."""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines import Completion, Engine, Loaded, threads
from exact_ways import assert_equal
from smollm2 import smollm2
from tiny_models import FALLBACKS, VARIANTS, build

from configs.settings import Settings
from engine.calibration import calibrate
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.reference.pages import pool_view

ALL_LAYERS = {"kv_cache_dtype_skip_layers": "none"}
FORMATS: dict[str, dict[str, str]] = {
    "bf16": {"kv_cache_dtype": "bf16"},
    "fp16": {"kv_cache_dtype": "fp16"},
    "fp32": {"kv_cache_dtype": "fp32"},
    "fp8_e4m3": {"kv_cache_dtype": "fp8"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "int8": {"kv_cache_dtype": "int8"},
    "int4": {"kv_cache_dtype": "int4"},
    "int8, int4": {"kv_cache_dtype": "int8", "kv_cache_dtype_v": "int4"},
    "static fp8_e4m3": {"kv_cache_dtype": "fp8", "kv_cache_scales": "found"},
    "static int8": {"kv_cache_dtype": "int8", "kv_cache_scales": "found"},
}
"""Settings by name; scales stand for those that are found for the format."""
FAMILIES = ("head-dim", "gemma3")
"""Grouped queries over whole contexts; one KV head, and windows shorter than the prompts."""
FALLBACK_FAMILIES = ("gemma2", "gpt_oss")
LENGTHS = (15, 31, 40, 62)
NUM_TOKENS = 16


def model_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


class Models:
    """Tiny models with a cache in each format, made when they are first asked for. Formats share the weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: dict[tuple[str, torch.dtype], Loaded] = {}
        self._expected: dict[tuple[str, str, torch.dtype], list[list[Completion]]] = {}

    def get(self, family: str, format: str, dtype: torch.dtype) -> Loaded:
        if (family, dtype) not in self._loaded:
            folder = self.folder / family
            if not folder.exists():
                tiny = VARIANTS.get(family) or replace(FALLBACKS[family], head_dim=32)
                build(folder, tiny)
            self._loaded[family, dtype] = Loaded.load(folder, dtype, 256)
        kv: dict[str, Any] = ALL_LAYERS | FORMATS[format]
        if "kv_cache_scales" in kv:
            kv["kv_cache_scales"] = str(self._scales(self.folder / family, kv["kv_cache_dtype"]))
        return replace(self._loaded[family, dtype], kv=kv)

    def _scales(self, folder: Path, name: str) -> Path:
        path = folder / f"{name}.scales"
        if not path.exists():
            flags = {"model": str(folder), "dtype": "float32", "device": "cpu", "kv_cache_dtype": name}
            calibrate(Settings.create(flags), None, "channel", lambda phase, fraction: None).save(path)
        return path

    def expected(self, family: str, format: str, dtype: torch.dtype) -> list[list[Completion]]:
        """For each prompt its three choices, each of them computed alone, at once."""
        if (family, format, dtype) not in self._expected:
            loaded = self.get(family, format, dtype)
            self._expected[family, format, dtype] = [
                [one_alone(loaded, prompt, params, index) for index in range(3)]
                for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]
        return self._expected[family, format, dtype]


PROMPTS = [random.Random(seed).choices(range(256), k=length) for seed, length in enumerate(LENGTHS)]
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    for seed, temperature in enumerate((1.0, 0.0, 0.8, 1.2))
]


def one_alone(loaded: Loaded, prompt: list[int], params: SamplingParams, index: int) -> Completion:
    engine = Engine(loaded, prefix_caching=False)
    results: dict[str, Completion] = {}
    [request_id] = engine.add(prompt, params, index=index)
    engine.drain(results)
    return results[request_id]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


# ------------------------------------------------------------------ the matrix
@dataclass(frozen=True)
class Row:
    """A way to run the prompts."""

    format: str
    family: str
    prefix: str
    """none: no cache; whole: they were run before; partial: their beginnings were."""
    fork: int
    """Choices of each prompt."""
    preempted: bool
    chunk: int
    block_size: int

    def __str__(self) -> str:
        parts = f"{self.format}, {self.family}, {self.prefix} hit, {self.fork} choices, chunks of {self.chunk}"
        return f"{parts}, pages of {self.block_size}" + (", preempted" if self.preempted else "")


FACTORS: dict[str, tuple[Any, ...]] = {
    "format": tuple(FORMATS),
    "family": FAMILIES,
    "prefix": ("none", "whole", "partial"),
    "fork": (1, 3),
    "preempted": (False, True),
    "chunk": (512, 16, 37),
    "block_size": (16, 8, 32),
}


def pairwise(factors: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Few rows in which every two values of different factors meet: greedily, each time the best of some drawn ones."""
    names, generator = list(factors), random.Random(4)
    columns = list(itertools.combinations(range(len(names)), 2))

    def pairs(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {(a, row[a], b, row[b]) for a, b in columns}

    left = set().union(*map(pairs, itertools.product(*factors.values())))
    while left:
        a, x, b, y = generator.choice(sorted(left, key=repr))
        drawn = []
        for _ in range(50):
            row = [generator.choice(values) for values in factors.values()]
            row[a], row[b] = x, y
            drawn.append(tuple(row))
        best = max(drawn, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        yield best


SAMPLE = [Row(*values) for values in pairwise(FACTORS)]


def rows_of(format: str, family: str) -> list[Row]:
    return [Row(format, family, *values) for values in itertools.product(*list(FACTORS.values())[2:])]


def run(row: Row, loaded: Loaded, num_blocks: int) -> tuple[list[list[Completion]], Engine]:
    engine = Engine(
        loaded,
        num_blocks=num_blocks,
        block_size=row.block_size,
        chunk=row.chunk,
        max_num_seqs=16,
        prefix_caching=row.prefix != "none",
    )
    if row.prefix != "none":
        share = {"whole": 1.0, "partial": 0.66}[row.prefix]
        before = [prompt[: int(len(prompt) * share)] for prompt in PROMPTS]
        engine.run(before, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    found = engine.run(PROMPTS, [msgspec.structs.replace(one, n=row.fork) for one in PARAMS])
    return [found[start : start + row.fork] for start in range(0, len(found), row.fork)], engine


def run_preempted(row: Row, loaded: Loaded) -> list[list[Completion]]:
    """In the smallest pool in which somebody is preempted. Which that is does not depend on the numbers in it."""
    longest = -(-(max(LENGTHS) + NUM_TOKENS) // row.block_size)
    key = (row.prefix, row.fork, row.chunk, row.block_size, row.family)
    for num_blocks in POOLS.get(key, range(longest + 1, 10 * longest)):
        found, engine = run(row, loaded, num_blocks)
        if engine.preemptions:
            POOLS[key] = range(num_blocks, num_blocks + 1)
            return found
    pytest.fail("nobody is ever preempted")


POOLS: dict[tuple[Any, ...], range] = {}
"""Pages in which somebody is preempted, once found."""


def check(row: Row, models: Models, dtype: torch.dtype) -> None:
    loaded = models.get(row.family, row.format, dtype)
    if row.preempted:
        found = run_preempted(row, loaded)
    else:
        found, _ = run(row, loaded, 1024)
        assert all((one.cached_tokens > 0) == (row.prefix != "none") for one in itertools.chain(*found)) or row.fork > 1
    for choices, expected in zip(found, models.expected(row.family, row.format, dtype), strict=True):
        assert_equal(choices, expected[: row.fork])


@pytest.mark.parametrize("row", SAMPLE, ids=str)
def test_every_two_of_them(row: Row, models: Models) -> None:
    check(row, models, model_dtype())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_all_of_them(format: str, family: str, dtype: str, models: Models) -> None:
    if dtype == "bfloat16" and model_dtype() is not torch.bfloat16:
        pytest.skip("this processor does not compute in bf16")
    for row in rows_of(format, family):
        check(row, models, getattr(torch, dtype))


@pytest.mark.parametrize("format", ["int8", "int4", "static fp8_e4m3"])
@pytest.mark.parametrize("family", FALLBACK_FAMILIES)
def test_classes_of_transformers(format: str, family: str, models: Models) -> None:
    """Soft-capped scores; sinks; windows."""
    check(Row(format, family, "partial", 1, True, 16, 8), models, model_dtype())


# ------------------------------------------------------------------ pages
def slot_of(engine: Engine, prompt: list[int]) -> int:
    rows = engine.executor.rows
    [slot] = [
        slot for slot in rows.lengths.nonzero()[0].tolist() if rows.token_ids[slot, : len(prompt)].tolist() == prompt
    ]
    return slot


def stored(engine: Engine, slot: int) -> list[torch.Tensor]:
    """Codes, scales and zero points of the slot's tokens, as bytes [tokens, ...], part by part and layer by layer."""
    runner, found = engine.executor.runner, []
    count = int(runner.rows.num_computed[slot])
    blocks = torch.from_numpy(runner.rows.block_tables[0, slot, : runner.rows.num_blocks[slot]]).long()
    for k, v in runner.attention.store.pages[0].spec.halves:
        for half, place in ((k, 0), (v, 1)):
            for part in half.parts:
                view = pool_view(runner.pools[0], part)[blocks].view(torch.uint8)
                if part is not half.codes:  # [blocks, heads, groups, size]
                    tokens = view.view(*view.shape[:3], -1, 2).permute(0, 3, 1, 2, 4).flatten(0, 1)
                elif len(part.shape) == 3:  # int4: [blocks, heads, bytes, size], or [blocks, heads, size, bytes]
                    tokens = view.permute(*((0, 3, 1, 2) if place == 0 else (0, 2, 1, 3))).flatten(0, 1)
                else:  # [blocks, heads, dims, size, pair], or [blocks, heads, size, dims, pair]
                    view = view.view(*view.shape[:-1], part.shape[-1], -1)
                    order = (0, 3, 1, 2, 4, 5) if place == 0 else (0, 2, 4, 1, 3, 5)
                    tokens = view.permute(*order).flatten(0, 1 if place == 0 else 2)
                found.append(tokens[:count].clone())
    return found


def run_watched(engine: Engine, prompt: list[int], params: SamplingParams) -> list[torch.Tensor]:
    """What the pages hold of the sequence when its last token has come; the others go on to their end."""
    [request_id] = engine.add(prompt, params)
    results: dict[str, Completion] = {}
    while request_id not in results or results[request_id].finish_reason is None:
        engine.step(results)
    bytes_then = stored(engine, slot_of(engine, prompt))
    engine.drain(results)
    assert len(bytes_then[0]) == len(prompt) + NUM_TOKENS - 1
    return bytes_then


def assert_same_bytes(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for some, others in zip(found, expected, strict=True):
        assert torch.equal(some, others)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_are_those_of_a_sequence_alone(format: str, models: Models) -> None:
    loaded = models.get("head-dim", format, model_dtype())
    prompt, params = PROMPTS[3], PARAMS[1]
    expected = run_watched(Engine(loaded, prefix_caching=False), prompt, params)
    whole = Engine(loaded)
    assert_same_bytes(run_watched(whole, prompt, params), expected)
    assert_same_bytes(
        run_watched(whole, prompt, params), expected
    )  # all but a token from the cache, the last page copied
    partial = Engine(loaded, chunk=37, max_num_seqs=16)
    partial.run([prompt[:41] + PROMPTS[2]], params)  # parts from it inside a page
    assert_same_bytes(run_watched(partial, prompt, params), expected)
    assert partial.core.stats().prefix_hits_total == 41
    company = Engine(loaded, num_blocks=12, chunk=16, max_num_seqs=16)
    for other in PROMPTS[:3]:
        company.add(other, msgspec.structs.replace(params, max_tokens=40))
    assert_same_bytes(run_watched(company, prompt, params), expected)
    assert company.preemptions > 0


@pytest.mark.parametrize("format", FORMATS)
def test_a_copied_page_is_the_same_byte_for_byte(format: str, models: Models) -> None:
    """Choices part behind the prompt, whose last page each of them gets a copy of."""
    loaded = models.get("head-dim", format, model_dtype())
    engine = Engine(loaded)
    ids = engine.add(PROMPTS[2], msgspec.structs.replace(PARAMS[0], n=3))
    results: dict[str, Completion] = {}
    while len(results) < 3 or not all(results[i].token_ids for i in ids):
        engine.step(results)
    rows = engine.executor.rows
    slots = rows.lengths.nonzero()[0].tolist()
    assert len(slots) == 3 and len(set(rows.block_tables[0, slots, 2].tolist())) == 3
    assert len(set(rows.block_tables[0, slots, 1].tolist())) == 1
    first, *others = [[tokens[: len(PROMPTS[2]) - 1] for tokens in stored(engine, slot)] for slot in slots]
    for other in others:
        assert_same_bytes(other, first)


# ------------------------------------------------------------------ A31, SmolLM2, and that the checks can fail
@pytest.mark.parametrize("format", ["fp8_e4m3", "int8", "int4", "static int8"])
def test_a31_shared_prefixes_in_a_pool_that_is_always_full(format: str, models: Models) -> None:
    """Hits, evictions and preemptions all the time, from the first step on: nobody gets other tokens than alone."""
    loaded = models.get("head-dim", format, model_dtype())
    generator = random.Random(5)
    heads = [generator.choices(range(256), k=40) for _ in range(4)]
    prompts = [heads[i % 4] + generator.choices(range(256), k=3 + 5 * (i % 5)) for i in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
    expected = [Engine(loaded, prefix_caching=False).run([prompt], params)[0] for prompt in prompts]
    engine = Engine(loaded, num_blocks=13, max_num_seqs=16)
    for _ in range(3):
        order = generator.sample(range(40), 40)
        found = engine.run([prompts[i] for i in order], params)
        assert_equal(found, [expected[i] for i in order])
    stats = engine.core.stats()
    assert stats.prefix_hits_total > 1000 and sum(stats.evictions_total.values()) > 100 and engine.preemptions > 10


@pytest.mark.parametrize("format", ["fp8_e4m3", "int8", "int4"])
def test_smollm2(format: str) -> None:
    """At its full size: in chunks, preempted, among others, from the cache, on one thread."""
    loaded = replace(smollm2(model_dtype()), kv=FORMATS[format])
    prompts = [random.Random(seed).choices(range(3, 49152), k=length) for seed, length in enumerate((3, 31, 90))]
    others = [random.Random(seed).choices(range(3, 49152), k=15) for seed in range(10, 15)]
    expected = [Engine(loaded).run([prompt], params)[0] for prompt, params in zip(prompts, PARAMS, strict=False)]
    engine = Engine(loaded, num_blocks=13, chunk=16, max_num_seqs=16)
    mixed = [*prompts, *others], [*PARAMS[:3], *[PARAMS[3]] * 5]
    assert_equal(engine.run(*mixed)[:3], expected)
    assert engine.preemptions > 0
    roomy = Engine(loaded)
    with threads(1):
        roomy.run([prompt[: len(prompt) * 2 // 3] for prompt in prompts], PARAMS[:3])
    found = roomy.run(prompts, PARAMS[:3])
    assert [one.cached_tokens for one in found] == [2, 20, 60]
    assert_equal(found, expected)


def test_the_check_can_fail(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse: a store whose scales span the tokens of a step is found out, in answers and in pages."""
    row = Row("int8", "head-dim", "whole", 1, False, 16, 16)
    loaded = models.get("head-dim", "int8", model_dtype())
    models.expected("head-dim", "int8", model_dtype())
    exact = ops.store_kv
    bytes_then = run_watched(Engine(loaded), PROMPTS[3], PARAMS[1])

    def spanning(k: torch.Tensor, v: torch.Tensor, pages: ops.LayerPages, slots: torch.Tensor) -> None:
        step = k.abs().max() / 64
        exact((k / step).round() * step, v, pages, slots)

    monkeypatch.setattr(ops, "store_kv", spanning)
    with pytest.raises(AssertionError):
        check(row, models, model_dtype())
    with pytest.raises(AssertionError):
        assert_same_bytes(run_watched(Engine(loaded, chunk=16, max_num_seqs=16), PROMPTS[3], PARAMS[1]), bytes_then)
