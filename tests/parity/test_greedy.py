"""Greedy tokens equal those of transformers in fp32, whatever cache, chunks, preemption and page size do."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engines import Engine, Loaded
from smollm2 import reference_model, smollm2_gguf
from tiny_models import VARIANTS, build, load_reference, quiet

from engine.sampling_params import SamplingParams
from engine.source import ModelSource
from engine.text.tokenizer import Tokenizer

TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
THREE = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, n=3)

WAYS = {
    "plain": {},
    "no prefix cache": {"prefix_caching": False},
    "chunks of 16": {"chunk": 16, "max_num_seqs": 16},
    "chunks of 64": {"chunk": 64},
    "pages of 8": {"block_size": 8, "num_blocks": 1024},
    "pages of 32": {"block_size": 32, "num_blocks": 256},
}

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


def oracle(model: torch.nn.Module, prompts: Sequence[Sequence[int]], together: bool = False) -> list[list[int]]:
    """transformers' own greedy `generate`: prompt by prompt, or all in one batch, padded on the left."""
    found = []
    longest = max(map(len, prompts))
    for batch in [prompts] if together else [[prompt] for prompt in prompts]:
        width = longest if together else len(batch[0])
        with quiet(), torch.no_grad():
            out = model.generate(
                torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch]),
                attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch]),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        found += out[:, width:].tolist()
    return found


def assert_same(engine: Engine, prompts: Sequence[Sequence[int]], expected: list[list[int]]) -> None:
    assert [one.token_ids for one in engine.run(prompts, GREEDY)] == expected


# ------------------------------------------------------------------ SmolLM2
@pytest.fixture(scope="module")
def smol() -> Loaded:
    return Loaded.load(smollm2_gguf(), torch.float32, 2048)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(ModelSource(smollm2_gguf(), "smollm2", "test"))
    return [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return oracle(reference_model(), prompts, together=True)


@pytest.mark.parametrize("way", WAYS)
def test_smollm2(smol: Loaded, prompts: list[list[int]], expected: list[list[int]], way: str) -> None:
    engine = Engine(smol, **WAYS[way])
    assert_same(engine, prompts, expected)
    if way == "plain":
        assert_same(engine, prompts[::-1], expected[::-1])  # again: from the cache


def test_smollm2_preempted(smol: Loaded, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(smol, num_blocks=30)
    assert_same(engine, prompts, expected)
    assert engine.preemptions > 0


def test_smollm2_three_choices(smol: Loaded, prompts: list[list[int]], expected: list[list[int]]) -> None:
    found = Engine(smol).run(prompts[:8], THREE)
    assert [one.token_ids for one in found] == [tokens for tokens in expected[:8] for _ in range(3)]
    assert all(found[3 * i + j].cached_tokens == len(prompts[i]) - 1 for i in range(8) for j in (1, 2))


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
    expected = oracle(load_reference(folder, window=256), prompts)
    for name, way in WAYS.items():
        engine = Engine(loaded, **way)
        assert_same(engine, prompts, expected)
        if name == "plain":
            assert_same(engine, prompts, expected)  # again: from the cache
    engine = Engine(loaded, num_blocks=18)
    assert_same(engine, prompts, expected)
    assert engine.preemptions > 0
    found = Engine(loaded).run(prompts, THREE)
    assert [one.token_ids for one in found] == [tokens for tokens in expected for _ in range(3)]


def test_smollm2_bf16_is_close(prompts: list[list[int]]) -> None:
    """Along our own bf16 text, each side's token is among the other's five likeliest at every position."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not compute in bf16")
    reference = copy.deepcopy(reference_model()).to(torch.bfloat16)
    loaded = Loaded.load(smollm2_gguf(), torch.bfloat16, 2048)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5)
    for prompt, ours in zip(prompts, Engine(loaded).run(prompts, params), strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ours.token_ids])).logits[0, len(prompt) - 1 : -1]
        tops = logits.topk(5).indices.tolist()
        for token, entry, top in zip(ours.token_ids, ours.logprobs, tops, strict=True):
            assert token in top and top[0] in entry.top_ids
