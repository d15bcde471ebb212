"""Ways to run the same requests that must not change a bit of their answers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from engines import Completion, Engine, Loaded, threads

from engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Requests:
    """Prompts of many lengths, greedy and sampled, and 32 others to keep them company."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    company: list[list[int]]
    few_blocks: int
    """Blocks of 16 that hold the prompts, but not the answers too."""

    @classmethod
    def of(cls, lengths: Sequence[int], ids: range, few_blocks: int) -> "Requests":
        def prompt(seed: int, length: int) -> list[int]:
            return random.Random(seed).choices(ids, k=length)

        choices = [(0.0, 1.0), (1.0, 1.0), (0.0, 1.0), (0.8, 0.9), (0.0, 1.0), (1.3, 1.0)]
        params = [
            SamplingParams(temperature=t, seed=seed, max_tokens=18, ignore_eos=True, logprobs=3, top_p=top_p)
            for seed, (t, top_p) in enumerate(choices[: len(lengths)])
        ]
        prompts = [prompt(seed, length) for seed, length in enumerate(lengths)]
        return cls(prompts, params, [prompt(1000 + i, 5 + 7 * (i % 11)) for i in range(32)], few_blocks)


def assert_equal(found: list[Completion], expected: list[Completion]) -> None:
    """Tokens, log-probabilities bit for bit, and the likeliest tokens."""
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.chosen.shape == other.chosen.shape
        assert torch.equal(one.chosen, other.chosen)
        assert [entry.top_ids for entry in one.logprobs] == [entry.top_ids for entry in other.logprobs]


def alone(loaded: Loaded, requests: Requests) -> list[Completion]:
    """Each request by itself, in an engine of its own."""
    pairs = zip(requests.prompts, requests.params, strict=True)
    return [Engine(loaded).run([prompt], [params])[0] for prompt, params in pairs]


def in_company(loaded: Loaded, requests: Requests) -> list[Completion]:
    """The requests among 32 others that come and go."""
    engine = Engine(loaded, num_blocks=1024)
    others = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=3 + i, ignore_eos=True) for i in range(32)]
    ids, company = [], iter(zip(requests.company, others, strict=True))
    results: dict[str, Completion] = {}
    for prompt, params in zip(requests.prompts, requests.params, strict=True):
        for _ in range(5):
            engine.add(*next(company))
        ids += engine.add(prompt, params)
        engine.step(results)
    for pair in company:
        engine.add(*pair)
    engine.drain(results)
    return [results[i] for i in ids]


def together(loaded: Loaded, requests: Requests, **options: int) -> list[Completion]:
    return Engine(loaded, **options).run(requests.prompts, requests.params)


def from_cache(loaded: Loaded, requests: Requests) -> list[Completion]:
    """All together, and once more."""
    engine = Engine(loaded)
    first, found = (engine.run(requests.prompts, requests.params) for _ in range(2))
    assert [one.cached_tokens for one in first] == [0] * len(requests.prompts)
    assert [one.cached_tokens for one in found] == [len(prompt) - 1 for prompt in requests.prompts]
    assert_equal(first, found)
    return found


def from_parts(loaded: Loaded, requests: Requests) -> list[Completion]:
    """Others have computed beginnings of the prompts: partial hits, cut anywhere."""
    engine = Engine(loaded)
    engine.run([prompt[: max(1, len(prompt) * 2 // 3)] for prompt in requests.prompts], requests.params)
    found = engine.run(requests.prompts, requests.params)
    assert all(one.cached_tokens > 0 for one in found[1:])
    return found


def followers(loaded: Loaded, requests: Requests) -> list[Completion]:
    """Twins arrive in the same step: the second reads pages that the first writes in that step."""
    twins = [prompt for prompt in requests.prompts for _ in range(2)]
    found = Engine(loaded).run(twins, [params for params in requests.params for _ in range(2)])
    assert any(one.cached_tokens > 0 for one in found[1::2])
    assert_equal(found[::2], found[1::2])
    return found[1::2]


def preempted(loaded: Loaded, requests: Requests) -> list[Completion]:
    engine = Engine(loaded, num_blocks=requests.few_blocks)
    found = engine.run(requests.prompts, requests.params)
    assert engine.preemptions > 0
    return found


def one_thread(loaded: Loaded, requests: Requests) -> list[Completion]:
    with threads(1):
        return together(loaded, requests)


WAYS: dict[str, Callable[[Loaded, Requests], list[Completion]]] = {
    "among 32 others": in_company,
    "chunks of 16": partial(together, chunk=16, max_num_seqs=16),
    "chunks of 64": partial(together, chunk=64),
    "no prefix cache": partial(together, prefix_caching=False),
    "pages of 8": partial(together, block_size=8, num_blocks=1024),
    "pages of 32": partial(together, block_size=32, num_blocks=256),
    "together, then whole hits": from_cache,
    "partial hits": from_parts,
    "followers in one step": followers,
    "preempted": preempted,
    "one thread": one_thread,
}
