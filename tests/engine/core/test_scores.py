"""Log-probabilities of prompts: the same whatever is cached, chunked or preempted (A21)."""

import pytest
from fakes import Harness, greedy, prompt, sequential_scores

from engine.errors import ContextLengthExceeded
from engine.sampling_params import SamplingParams

SCORE = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [1, 5, 64])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 37])
def test_a21_a_prompt_is_scored_whole_cold_and_warm(length: int, budget: int, depth: int):
    harness = Harness(block_size=4, max_num_batched_tokens=budget, depth=depth)
    for request_id in ("cold", "warm"):
        result = harness.add(request_id, prompt(length), SCORE)
        harness.run()
        harness.assert_sequential(request_id)
        assert len(result.prompt_logprobs) == length - 1 and result.cached_tokens == 0
        harness.assert_idle()
    assert harness.complete(prompt(length), greedy(1)).cached_tokens == length - 1  # what it computed is cached


def test_scores_and_tokens_of_one_request():
    harness = Harness(block_size=4, max_num_batched_tokens=8)
    harness.add("other", prompt(20), greedy(30))
    harness.add("r", prompt(21), greedy(9, prompt_logprobs=0))
    harness.run()
    harness.assert_sequential("r")
    harness.assert_sequential("other")


def test_a_preemption_brings_no_score_twice():
    harness = Harness(block_size=4, num_blocks=16, max_num_batched_tokens=8)
    harness.add("old", prompt(8, 500), greedy(40))
    scored = harness.add("r", prompt(30), greedy(30, prompt_logprobs=0))
    harness.run()
    assert scored.num_preemptions > 0
    assert [at.logprob for at in scored.prompt_logprobs] == sequential_scores(prompt(30))
    harness.assert_sequential("r")


def test_a_prompt_that_fills_the_window_can_be_scored():
    harness = Harness(block_size=4, max_model_len=16)
    with pytest.raises(ContextLengthExceeded):
        harness.add("too long", prompt(17), SCORE)
    with pytest.raises(ContextLengthExceeded):
        harness.add("no room", prompt(16), greedy(1, prompt_logprobs=0))
    harness.add("r", prompt(16), SCORE)
    harness.run()
    harness.assert_sequential("r")


def test_the_miss_is_explained():
    harness = Harness(block_size=4)
    for request_id in ("cold", "warm"):
        harness.add(request_id, prompt(9), SCORE)
        harness.run()
    assert [event["reason"] for event in harness.core.events(100) if event["kind"] == "miss"] == ["prompt_logprobs"] * 2
