"""Steps planned before the last one's tokens are known: late ends, late preemptions."""

import pytest
from fakes import EOS, Harness, greedy, logged, prompt, sequential

from engine.request import Status
from engine.sampling_params import SamplingParams


def test_with_overlap_a_sequence_gets_its_next_row_before_its_token_is_known():
    harness = logged(depth=2)
    harness.add("r", prompt(4), greedy(3))
    assert harness.step() == []
    assert [output.request_id for output in harness.step()] == ["r"]
    assert harness.executor.max_unfinished == 2
    assert [plan.num_tokens for plan in harness.executor.log] == [[4], [1]]
    harness.run()
    assert [plan.num_tokens for plan in harness.executor.log] == [[4], [1], [1]]  # the limit is known beforehand
    harness.assert_sequential("r")


def test_with_overlap_the_token_after_the_end_is_dropped_and_pages_come_back_once():
    tokens, reason = sequential(prompt(5), SamplingParams(temperature=0.0, max_tokens=500), 0, 10_000)
    assert reason == "stop" and tokens[-1] == EOS
    harness = logged(depth=2, num_blocks=200)
    harness.add("r", prompt(5), SamplingParams(temperature=0.0, max_tokens=500))
    harness.run()
    harness.assert_sequential("r")
    assert len(harness.executor.log) == len(tokens) + 1
    harness.assert_idle()


@pytest.mark.parametrize("depth", [2, 3])
def test_with_overlap_a_preempted_request_still_gets_its_token(depth: int):
    harness = Harness(num_blocks=10, block_size=4, depth=depth, prefix_caching=False)
    harness.add("older", prompt(12), greedy(20))
    younger = harness.add("younger", prompt(12, 500), greedy(20))
    known = 0
    while not harness.core.stats().preemptions_total:
        known = len(younger.token_ids)
        harness.step()
    request = harness.scheduler.requests["younger"]
    while request.num_in_flight:
        harness.step()
    assert request.status is Status.WAITING and len(younger.token_ids) > known
    harness.run()
    for request_id in ("older", "younger"):
        harness.assert_sequential(request_id)


def test_with_overlap_a_preempted_request_comes_back_only_with_all_its_tokens():
    """Pages come free while its last token is still in flight: whenever that happens, it has to wait for the token."""
    waits = 0
    for length in range(2, 28):
        harness = Harness(num_blocks=16, block_size=4, depth=3, prefix_caching=False)
        harness.add("older", prompt(12), greedy(24))
        harness.add("passing", prompt(12, 900), greedy(length))
        harness.add("younger", prompt(12, 500), greedy(24))
        harness.run()
        for request_id in harness.asked:
            harness.assert_sequential(request_id)
        waits += sum(event["reason"] == "unfinished_step" for event in harness.core.events(1000))
    assert waits > 0
