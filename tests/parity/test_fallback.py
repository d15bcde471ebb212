"""Families that no code of ours names, through transformers' own classes: its greedy tokens in fp32, and answers that
are the same bit for bit whatever else is served."""

from pathlib import Path

import pytest
import torch
from engines import Completion, Engine, Loaded
from exact_ways import WAYS, Requests, alone, assert_equal
from oracle import oracle
from tiny_models import FALLBACKS, build, load_reference

from engine.model.fallback.model import TransformersModel
from engine.sampling_params import SamplingParams

TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
EXACT = sorted(FALLBACKS)
"""A router's own product of small matrices may be rounded by company, which start-up says (`runner/company.py`)."""
WAYS_THAT_DIFFER = ("among 32 others", "chunks of 16", "partial hits", "preempted", "one thread")
REQUESTS = Requests.of((3, 16, 31, 75, 130), range(256), few_blocks=20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: build(tmp_path_factory.mktemp(name), tiny) for name, tiny in FALLBACKS.items()}


@pytest.mark.parametrize("name", sorted(FALLBACKS))
def test_greedy(name: str, folders: dict[str, Path]) -> None:
    loaded = Loaded.load(folders[name], torch.float32, 256)
    assert isinstance(loaded.model, TransformersModel)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (1, 15, 17, 40, 90)]
    engine = Engine(loaded)
    first = [found.token_ids for found in engine.run(prompts, GREEDY)]
    expected = oracle(load_reference(folders[name]), prompts, first)
    assert first == expected and {len(text) for text in first} == {TOKENS}
    small = Engine(loaded, num_blocks=14)
    for one in (engine, Engine(loaded, chunk=16, max_num_seqs=16), small):  # from the cache first
        assert [found.token_ids for found in one.run(prompts, GREEDY)] == expected
    assert small.preemptions > 0


@pytest.fixture(scope="module", params=[(name, dtype) for name in EXACT for dtype in ("bf16", "fp32")], ids="-".join)
def loaded(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Loaded:
    name, dtype = request.param
    if dtype == "bf16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not compute in bf16")
    return Loaded.load(folders[name], torch.bfloat16 if dtype == "bf16" else torch.float32, 256)


@pytest.fixture(scope="module")
def expected(loaded: Loaded) -> list[Completion]:
    return alone(loaded, REQUESTS)


@pytest.mark.parametrize("way", WAYS_THAT_DIFFER)
def test_bits(loaded: Loaded, expected: list[Completion], way: str) -> None:
    assert_equal(WAYS[way](loaded, REQUESTS), expected)
