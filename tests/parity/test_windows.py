"""Layers with sliding windows, end to end: pools that keep less than the contexts, and the same answers to the bit."""

import random
from pathlib import Path

import pytest
import tiny_models
import torch
from engines import Completion, Engine, Loaded

from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:no native kernels:RuntimeWarning")  # torch code serves as well

FAMILIES = ("gemma3", "mistral-window", "qwen2-window")
"""Some layers with a window; all; none but one."""
LENGTH, SIZE = 400, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=3)
FEW = -(-(24 + 16) // SIZE) + 2
"""The fewest pages of the windowed group: what one sequence holds at once, in steps of 16 tokens."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp(request.param), tiny_models.VARIANTS[request.param])


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return Loaded.load(folder, torch.float32, LENGTH)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random.Random(seed).choices(range(256), k=length) for seed, length in enumerate((130, 20, 75, 31, 100))]


@pytest.fixture(scope="module")
def expected(loaded: Loaded, prompts: list[list[int]]) -> list[Completion]:
    """Each alone, computed at once, in pools that forget nothing."""
    return [Engine(loaded, block_size=SIZE).run([prompt], GREEDY)[0] for prompt in prompts]


def small(loaded: Loaded, num_extents: int, **settings: object) -> Engine:
    """Pools for few pages in which whatever is given up turns into NaN at once."""
    engine = Engine(loaded, block_size=SIZE, num_extents=num_extents, **{"chunk": 16, **settings})
    windows, step = engine.core.scheduler.kv.windows, engine.core.step
    assert len(windows) == 1

    def poisoning() -> list:
        outputs = step()
        for group, window in enumerate(windows, 1):
            engine.executor.runner.pools[group][window.free] = 255
        return outputs

    engine.core.step = poisoning
    return engine


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids and torch.equal(one.chosen, other.chosen)


def test_values_are_those_of_transformers(folder: Path, prompts: list[list[int]], expected: list[Completion]) -> None:
    model = tiny_models.load_reference(folder)
    for prompt, completion in zip(prompts, expected, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == completion.token_ids
        chosen = torch.log_softmax(logits.double(), dim=-1)[range(40), completion.token_ids]
        torch.testing.assert_close(completion.chosen[:, 0], chosen, rtol=0, atol=1e-4)


def test_one_sequence_fits_the_fewest_pages(
    loaded: Loaded, prompts: list[list[int]], expected: list[Completion]
) -> None:
    engine = small(loaded, FEW)
    assert engine.core.scheduler.window == LENGTH and LENGTH > FEW * SIZE
    found = [engine.run([prompt], GREEDY)[0] for prompt in prompts]
    assert_same(found, expected)
    assert engine.core.scheduler.kv.evictions_total["window"] > 0


def test_company_and_chunks_change_no_bit(loaded: Loaded, prompts: list[list[int]], expected: list[Completion]) -> None:
    engine = small(loaded, 2 * FEW + 3, chunk=19)
    assert_same(engine.run(prompts, GREEDY), expected)


def test_preemption_for_want_of_extents_changes_no_bit(loaded: Loaded, prompts: list[list[int]]) -> None:
    """Short prompts are admitted together and outgrow the windowed group's pool; blocks are left."""
    short = [prompt[:6] for prompt in prompts]
    reference = [Engine(loaded, block_size=SIZE).run([prompt], GREEDY)[0] for prompt in short]
    engine = small(loaded, FEW + 3)
    assert_same(engine.run(short, GREEDY), reference)
    assert engine.preemptions > 0


@pytest.mark.parametrize("head", [130, 97, 64])
def test_prefix_hits_change_no_bit(
    loaded: Loaded, prompts: list[list[int]], expected: list[Completion], head: int
) -> None:
    """Whole blocks are shared, and a part of one is copied, in every group."""
    follower = prompts[0][:head] + prompts[1]
    reference = Engine(loaded, block_size=SIZE).run([follower], GREEDY)
    engine = small(loaded, 5 * FEW)
    assert_same(engine.run([prompts[0]], GREEDY), expected[:1])
    found = engine.run([follower], GREEDY)
    assert found[0].cached_tokens == head
    assert_same(found, reference)


def test_choices_share_a_prompt_longer_than_the_window(loaded: Loaded, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=30, ignore_eos=True, logprobs=1)
    found = small(loaded, 3 * FEW).run([prompts[0]], params)
    assert_same(found, Engine(loaded, block_size=SIZE).run([prompts[0]], params))
    assert [one.cached_tokens for one in found] == [0, 129, 129]
