import pytest
from fakes import make_request

from engine.core.outputs import failure, take_row
from engine.messages import AddRequest, PromptScores, RowResult, TokenLogprobs
from engine.request import Request
from engine.sampling_params import SamplingParams

EOS = 9


def sequence(max_total: int = 100, **params: object) -> Request:
    add = AddRequest(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(**params), arrival=1.0)
    request = Request(add, (0.0, 1), max_total, frozenset({EOS}))
    request.cached_tokens = 1
    return request


def test_the_first_output_tells_hits_and_times():
    request = sequence()
    first, second = (take_row(request, RowResult(0, [token]), None, now) for token, now in ((3, 5.0), (4, 6.0)))
    assert (first.token_ids, first.cached_tokens, first.finish_reason) == ([3], 1, None)
    assert first.timings is not None and (first.timings.arrival, first.timings.first_token) == (1.0, 5.0)
    assert (second.token_ids, second.cached_tokens, second.timings) == ([4], 0, None)
    assert request.token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason"),
    [
        ({}, "stop", None),
        ({"ignore_eos": True}, None, None),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, "stop", EOS),
        ({"stop_token_ids": (5,)}, "stop", None),
        ({"min_tokens": 1}, None, None),
    ],
)
def test_end_of_sequence(params: dict, reason: str | None, stop_reason: int | None):
    output = take_row(sequence(**params), RowResult(0, [EOS]), None, 0.0)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([EOS], reason, stop_reason)


def test_a_stop_token_is_named_and_published():
    request = sequence(stop_token_ids=(5,))
    output = take_row(request, RowResult(0, [5]), None, 2.0)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([5], "stop", 5)
    assert output.timings is not None and output.timings.finished == 2.0


def test_min_tokens_come_first():
    request = sequence(min_tokens=2, max_tokens=50)
    reasons = [take_row(request, RowResult(0, [EOS]), None, 0.0).finish_reason for _ in range(3)]
    assert reasons == [None, None, "stop"]


def test_what_comes_behind_a_refresh_is_dropped():
    """It was drawn from pages that are to be computed anew."""
    request = sequence(max_total=7)
    request.halts_at = 4
    output = take_row(request, RowResult(0, [3, 4, 5]), None, 0.0)
    assert (output.token_ids, output.finish_reason, request.token_ids) == ([3, 4], None, [1, 2, 3, 4])
    request.halts_at = 7
    output = take_row(request, RowResult(0, [5, 6, 7, 8]), None, 0.0)
    assert (output.token_ids, output.finish_reason) == ([5, 6, 7], "length")


def test_length_ends_at_max_total():
    request = sequence(max_total=4)
    assert take_row(request, RowResult(0, [3]), None, 0.0).finish_reason is None
    assert take_row(request, RowResult(0, [4]), None, 0.0).finish_reason == "length"


def test_stop_wins_over_length():
    assert take_row(sequence(max_total=3), RowResult(0, [EOS]), None, 0.0).finish_reason == "stop"


@pytest.mark.parametrize(("row", "kept"), [([3, EOS, 4], [3, EOS]), ([3, 4, 5, 6], [3, 4, 5]), ([3, 4], [3, 4])])
def test_several_tokens_are_taken_as_far_as_the_sequence_goes(row: list[int], kept: list[int]):
    logprobs = [TokenLogprobs(-float(token), 1, [], []) for token in row]
    output = take_row(sequence(max_total=5), RowResult(0, row, logprobs), None, 0.0)
    assert output.token_ids == kept
    assert [logprob.logprob for logprob in output.logprobs or []] == [-token for token in kept]


def test_an_outputs_times_do_not_change_afterwards():
    request = sequence()
    first = take_row(request, RowResult(0, [3]), None, 5.0)
    take_row(request, RowResult(0, [EOS]), None, 6.0)
    assert first.timings is not None and first.timings.finished == 0.0


def test_failure_is_the_last_output():
    output = failure(sequence(), "no more", 3.0)
    assert (output.finish_reason, output.error, output.token_ids) == ("error", "no more", [])
    assert output.timings is not None and output.timings.finished == 3.0


def test_no_score_is_brought_twice():
    """After a preemption whose pages were evicted, rows that had been scored are computed again."""
    request = make_request(list(range(11)), params=SamplingParams(max_tokens=0, prompt_logprobs=0))
    every = [TokenLogprobs(-float(place), 1, [], []) for place in range(1, 11)]
    assert take_row(request, None, PromptScores(1, every[:4]), 0.0).prompt_logprobs == every[:4]
    assert take_row(request, None, PromptScores(1, every[:2]), 0.0).prompt_logprobs == []
    assert take_row(request, None, PromptScores(3, every[2:9]), 0.0).prompt_logprobs == every[4:9]
    assert request.num_scored == 9 and request.wants_scores
