"""Log-probabilities of prompts: transformers' own, the same bits whatever is cached, chunked or in company (A21)."""

import random

import pytest
import tiny_models
import torch
from engines import Completion, Engine, Loaded

from engine.sampling_params import SamplingParams

LENGTHS = (2, 17, 37, 150)
SCORE = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=3)
PROMPTS = [random.Random(seed).choices(range(256), k=length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tiny_models.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder) -> Loaded:
    return Loaded.load(folder, torch.float32, 256)


def scores(completions: list[Completion]) -> list[list[float]]:
    return [[at.logprob for at in one.prompt_logprobs] for one in completions]


def test_a21_equal_to_a_plain_forward_pass(folder, loaded: Loaded):
    reference = tiny_models.load_reference(folder)
    for prompt, one in zip(PROMPTS, Engine(loaded).run(PROMPTS, SCORE), strict=True):
        assert (one.token_ids, one.finish_reason) == ([], "length")
        with torch.no_grad():
            expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0, :-1], dim=-1)
        found = torch.tensor([at.logprob for at in one.prompt_logprobs])
        torch.testing.assert_close(
            found, expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=1e-4, rtol=0
        )
        assert [at.top_ids for at in one.prompt_logprobs] == expected.topk(3).indices.tolist()


def test_a21_the_same_bits_cold_warm_chunked_and_in_company(loaded: Loaded):
    alone = [scores(Engine(loaded).run([prompt], SCORE))[0] for prompt in PROMPTS]
    engine = Engine(loaded)
    assert scores(engine.run(PROMPTS, SCORE)) == alone
    assert scores(engine.run(PROMPTS, SCORE)) == alone
    assert scores(Engine(loaded, chunk=16, max_num_seqs=16).run(PROMPTS, SCORE)) == alone
    others = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    mixed = Engine(loaded).run([*PROMPTS, *PROMPTS], [*([others] * len(PROMPTS)), *([SCORE] * len(PROMPTS))])
    assert scores(mixed[len(PROMPTS) :]) == alone


def test_scoring_changes_no_token(loaded: Loaded):
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    scored = SamplingParams(**{**{f: getattr(plain, f) for f in plain.__struct_fields__}, "prompt_logprobs": 0})
    expected, found = (Engine(loaded).run(PROMPTS, params) for params in (plain, scored))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.chosen.tolist() for one in found] == [one.chosen.tolist() for one in expected]
