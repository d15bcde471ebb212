"""Greedy tokens equal those of transformers in fp32, whatever cache, chunks, preemption and page size do."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engines import Engine, Loaded
from msgspec.structs import replace
from oracle import oracle
from smollm2 import reference_model, smollm2, smollm2_gguf
from tiny_models import VARIANTS, build, load_reference

from engine.sampling_params import SamplingParams
from engine.source import ModelSource
from engine.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
"""Enough to leave the windows that tiny models have, and pages of 32."""

WAYS = {
    "small chunks and pages": {"chunk": 16, "max_num_seqs": 8, "block_size": 8, "num_blocks": 1024},
    "larger ones, no prefix cache": {"chunk": 64, "block_size": 32, "num_blocks": 256, "prefix_caching": False},
}
"""Each difference by itself, bit for bit: `test_exact.py`."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are:\n1.",
    "Q: What is 17 + 25?\nA:",
    "Water boils at",
    "In 1969, astronauts",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "The recipe needs flour, sugar,",
    "Die Hauptstadt von Deutschland ist",
    "A prime number is a number that",
    "import numpy as np\n\nx = np.",
    "Shakespeare wrote",
    "The best way to learn programming is",
    "Photosynthesis is the process by which",
    "The train left the station at",
    "1, 1, 2, 3, 5, 8,",
    "<html>\n<head>\n<title>",
    "My favourite book is about",
    "To be, or not to be,",
    "The KV cache of a language model",
)


def texts(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    found = [one.token_ids for one in engine.run(prompts, params)]
    assert [len(text) for text in found] == [params.max_tokens] * len(prompts) * params.n
    return found


def short(expected: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(tokens[: SHORT.max_tokens]) for tokens in expected]


# ------------------------------------------------------------------ SmolLM2
@pytest.fixture(scope="module")
def smol() -> Loaded:
    return smollm2(torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(ModelSource(smollm2_gguf(), "smollm2", "test"))
    return [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]


@pytest.fixture(scope="module")
def plain(smol: Loaded) -> Engine:
    return Engine(smol)


@pytest.fixture(scope="module")
def found(plain: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return texts(plain, prompts)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], found: list[list[int]]) -> list[list[int]]:
    return oracle(reference_model(), prompts, found)


def test_smollm2(plain: Engine, prompts: list[list[int]], found: list[list[int]], expected: list[list[int]]) -> None:
    assert found == expected
    assert texts(plain, prompts[::-1]) == expected[::-1]  # again: from the cache


@pytest.mark.parametrize("way", WAYS)
def test_smollm2_in_other_ways(smol: Loaded, prompts: list[list[int]], expected: list[list[int]], way: str) -> None:
    assert texts(Engine(smol, **WAYS[way]), prompts[::2], SHORT) == short(expected[::2])


def test_smollm2_preempted(smol: Loaded, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(smol, num_blocks=10)
    assert texts(engine, prompts[::3], SHORT) == short(expected[::3])
    assert engine.preemptions > 0


def test_smollm2_three_choices(smol: Loaded, prompts: list[list[int]], expected: list[list[int]]) -> None:
    found = Engine(smol).run(prompts[:4], replace(SHORT, n=3))
    assert [one.token_ids for one in found] == [tokens for tokens in short(expected[:4]) for _ in range(3)]
    assert all(found[3 * i + j].cached_tokens == len(prompts[i]) - 1 for i in range(4) for j in (1, 2))


# ------------------------------------------------------------------ tiny random models
@pytest.fixture(scope="module", params=sorted(VARIANTS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Path]:
    folder = build(tmp_path_factory.mktemp(request.param), VARIANTS[request.param])
    return Loaded.load(folder, torch.float32, 256), folder


def test_tiny(tiny: tuple[Loaded, Path]) -> None:
    """Every family and shape; windows are shorter than most of the prompts."""
    loaded, folder = tiny
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (1, 5, 15, 16, 17, 40, 90)]
    engine = Engine(loaded)
    found = texts(engine, prompts, SHORT)
    expected = oracle(load_reference(folder, window=256), prompts, found)
    assert found == expected
    assert texts(engine, prompts, SHORT) == expected  # again: from the cache
    for way in WAYS.values():
        assert texts(Engine(loaded, **way), prompts, SHORT) == expected
    engine = Engine(loaded, num_blocks=18)
    assert texts(engine, prompts, SHORT) == expected
    assert engine.preemptions > 0
    three = texts(Engine(loaded), prompts, replace(SHORT, n=3))
    assert three == [tokens for tokens in expected for _ in range(3)]


def test_smollm2_bf16_is_close(prompts: list[list[int]]) -> None:
    """Along its own text, each side's token is among the other's five likeliest at every position: theirs in fp32."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not compute in bf16")
    reference, loaded = reference_model(), smollm2(torch.bfloat16)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5)
    for prompt, ours in zip(prompts[::2], Engine(loaded).run(prompts[::2], params), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ours.token_ids])).logits[0, len(prompt) - 1 : -1]
        tops = logits.topk(5).indices.tolist()
        for token, entry, top in zip(ours.token_ids, ours.logprobs, tops, strict=True):
            assert token in top and top[0] in entry.top_ids
