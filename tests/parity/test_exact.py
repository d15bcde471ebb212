"""Bit for bit: a request's tokens and log-probabilities do not depend on anything but the request."""

import random
from collections.abc import Callable

import pytest
import torch
from engines import Completion, Engine, Loaded, threads
from smollm2 import smollm2_gguf

from engine.sampling_params import SamplingParams
from kernels import ops

LENGTHS = (3, 16, 31, 75, 130, 300)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(scope="module", params=sorted(DTYPES))
def smol(request: pytest.FixtureRequest) -> Loaded:
    dtype = DTYPES[request.param]
    if dtype is torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not compute in bf16")
    return Loaded.load(smollm2_gguf(), dtype, 2048)


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 49152), k=length)


PROMPTS = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
PARAMS = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True, logprobs=3, top_p=top_p)
    for seed, (temperature, top_p) in enumerate(
        [(0.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.8, 0.9), (0.0, 1.0), (1.3, 1.0)]
    )
]
COMPANY = [random_prompt(1000 + i, 5 + 13 * (i % 11)) for i in range(32)]


@pytest.fixture(scope="module")
def alone(smol: Loaded) -> list[Completion]:
    """Each request by itself, in an engine of its own."""
    return [Engine(smol).run([prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def assert_equal(found: list[Completion], expected: list[Completion]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.chosen.shape == other.chosen.shape
        assert torch.equal(one.chosen, other.chosen)
        assert [entry.top_ids for entry in one.logprobs] == [entry.top_ids for entry in other.logprobs]


def in_company(engine: Engine) -> list[Completion]:
    """The requests among 32 others that come and go."""
    others = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=3 + i, ignore_eos=True) for i in range(len(COMPANY))
    ]
    ids, company = [], iter(zip(COMPANY, others, strict=True))
    results: dict[str, Completion] = {}
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        for _ in range(5):
            engine.add(*next(company))
        ids += engine.add(prompt, params)
        engine.step(results)
    for pair in company:
        engine.add(*pair)
    engine.drain(results)
    return [results[i] for i in ids]


def together(**options: object) -> Callable[[Loaded], list[Completion]]:
    return lambda loaded: Engine(loaded, **options).run(PROMPTS, PARAMS)  # type: ignore[arg-type]


def from_cache(loaded: Loaded) -> list[Completion]:
    engine = Engine(loaded)
    engine.run(PROMPTS, PARAMS)
    found = engine.run(PROMPTS, PARAMS)
    assert [one.cached_tokens for one in found] == [len(prompt) - 1 for prompt in PROMPTS]
    return found


def from_parts(loaded: Loaded) -> list[Completion]:
    """Others have computed beginnings of the prompts: partial hits, cut anywhere."""
    engine = Engine(loaded)
    engine.run([prompt[: max(1, len(prompt) * 2 // 3)] for prompt in PROMPTS], PARAMS)
    found = engine.run(PROMPTS, PARAMS)
    assert all(one.cached_tokens > 0 for one in found[1:])
    return found


def followers(loaded: Loaded) -> list[Completion]:
    """Twins arrive in the same step: the second reads pages that the first writes in that step."""
    engine = Engine(loaded)
    found = engine.run([p for prompt in PROMPTS for p in (prompt, prompt)], [p for one in PARAMS for p in (one, one)])
    assert any(one.cached_tokens > 0 for one in found[1::2])
    assert_equal(found[::2], found[1::2])
    return found[1::2]


def preempted(loaded: Loaded) -> list[Completion]:
    engine = Engine(loaded, num_blocks=40)  # enough for the prompts, not for the answers
    found = engine.run(PROMPTS, PARAMS)
    assert engine.preemptions > 0
    return found


def one_thread(loaded: Loaded) -> list[Completion]:
    with threads(1):
        return Engine(loaded).run(PROMPTS, PARAMS)


WAYS: dict[str, Callable[[Loaded], list[Completion]]] = {
    "together": together(),
    "among 32 others": lambda loaded: in_company(Engine(loaded, num_blocks=1024)),
    "chunks of 16": together(chunk=16, max_num_seqs=16),
    "chunks of 64": together(chunk=64),
    "no prefix cache": together(prefix_caching=False),
    "pages of 8": together(block_size=8, num_blocks=1024),
    "pages of 32": together(block_size=32, num_blocks=256),
    "whole hits": from_cache,
    "partial hits": from_parts,
    "followers in one step": followers,
    "preempted": preempted,
    "one thread": one_thread,
}


@pytest.mark.parametrize("way", WAYS)
def test_bits(smol: Loaded, alone: list[Completion], way: str) -> None:
    assert_equal(WAYS[way](smol), alone)


def test_the_check_can_fail(smol: Loaded, alone: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse: a linear layer whose sums depend on the number of rows is found out."""
    exact = ops.linear

    def company_dependent(x: torch.Tensor, packed: ops.PackedLinear) -> torch.Tensor:
        if x.shape[0] <= 4:
            return exact(x, packed)
        half = x.shape[1] // 2
        left, right = torch.zeros_like(x), torch.zeros_like(x)
        left[:, :half], right[:, half:] = x[:, :half], x[:, half:]
        return exact(left, packed) + exact(right, packed)

    monkeypatch.setattr(ops, "linear", company_dependent)
    found = Engine(smol).run(PROMPTS, PARAMS)
    with pytest.raises(AssertionError):
        assert_equal(found, alone)
