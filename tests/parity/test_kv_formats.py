"""Every format of the KV cache: answers are the same bit for bit as the same format's without company, forks, hits,
preemption, chunks and other page sizes; and so are codes and scales in the pages."""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines import Completion, Engine, Loaded
from exact_ways import WAYS, Requests, alone, assert_equal
from smollm2 import smollm2_gguf
from tiny_models import VARIANTS, build

from configs.kv import KVPart
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
    "static fp8_e4m3": {"kv_cache_dtype": "fp8", "kv_cache_scales": "fp8"},
    "static int8": {"kv_cache_dtype": "int8", "kv_cache_scales": "int8"},
}
"""Settings by name; scales stand for those that are found for the format."""
FAMILIES = ("head-dim", "gemma3")
"""Grouped queries over whole contexts; one KV head, and windows shorter than the prompts."""
LENGTHS = (15, 31, 40, 62)
NUM_TOKENS = 12


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
                build(folder, VARIANTS[family])
                for name in ("fp8", "int8"):
                    flags = {"model": str(folder), "dtype": "float32", "device": "cpu", "kv_cache_dtype": name}
                    scales = calibrate(Settings.create(flags), None, "channel", lambda phase, fraction: None)
                    scales.save(folder / name)
            self._loaded[family, dtype] = Loaded.load(folder, dtype, 256)
        kv: dict[str, Any] = ALL_LAYERS | FORMATS[format]
        if "kv_cache_scales" in kv:
            kv["kv_cache_scales"] = str(self.folder / family / kv["kv_cache_scales"])
        return replace(self._loaded[family, dtype], kv=kv)

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
WHOLE = [Row(*values) for values in itertools.product(*FACTORS.values())]


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
@pytest.mark.parametrize("row", WHOLE, ids=str)
def test_all_of_them(row: Row, dtype: str, models: Models) -> None:
    if dtype == "bfloat16" and model_dtype() is not torch.bfloat16:
        pytest.skip("this processor does not compute in bf16")
    check(row, models, getattr(torch, dtype))
