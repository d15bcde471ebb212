"""The arithmetic of `octavo bench`, on given numbers."""

from typing import Any

import pytest

from server.bench.drive import Measured, measured, median, p95, ratios
from server.bench.endpoint import Answer, RequestError
from server.bench.report import Outcome, Report
from server.bench.workloads import Turn


def answer(times: list[float], **counts: Any) -> tuple[Turn, Answer]:
    given = {"end": times[-1], "prompt_tokens": 10, "output_tokens": len(times), **counts}
    return Turn("", 4), Answer(times=times, is_whole=True, **given)


def one(**changed: Any) -> Measured:
    found = measured([answer([1.0, 1.5, 2.0, 2.5])], [], 4.0)
    return Measured(**{**vars(found), **changed})


def test_what_a_round_took():
    answers = [answer([1.0, 1.1, 1.2, 1.3]), answer([2.0, 2.2, 2.6], end=2.8, output_tokens=5), answer([4.0])]
    found = measured(answers, [RequestError("first"), RequestError("second")], 5.0)
    assert (found.requests, found.failed, found.first_error, found.short) == (5, 2, "first", 1)
    assert (found.prompt_tokens, found.output_tokens, found.output_tokens_per_s) == (30, 10, 2.0)
    assert found.ttft_s == 2.0 and found.ttft_p95_s is None and not found.counts_chunks
    assert found.token_s == pytest.approx((0.1 + 0.2) / 2)  # (2.8 − 2.0) / 4: chunks may hold several tokens


def test_counts_that_a_server_leaves_out():
    found = measured([answer([1.0, 2.0], output_tokens=None, cached_tokens=5), answer([1.0])], [], 1.0)
    assert (found.output_tokens, found.counts_chunks, found.cached_tokens) == (3, True, 5)
    assert measured([answer([1.0], prompt_tokens=None), answer([1.0])], [], 1.0).prompt_tokens is None


def test_a_round_in_which_all_failed():
    found = measured([], [RequestError("no")], 1.0)
    assert found.output_tokens is found.output_tokens_per_s is found.ttft_s is found.token_s is found.gap_p95_s is None


def test_medians_and_percentiles():
    assert median([3.0, None, 1.0, 2.0]) == 2.0 and median([None]) is None and median([]) is None
    assert p95([1.0] * 19) is None
    assert p95([float(number) for number in range(101)]) == pytest.approx(95.0)


def test_ratios_are_of_pairs():
    """Of the pairs, not of the medians: those are 3 and 3, which would be level."""
    ours, theirs = [1.0, 3.0, 5.0], [3.0, 1.0, 4.0]
    assert ratios(ours, theirs, more_is_better=True) == pytest.approx([1 / 3, 3.0, 1.25])
    assert ratios(ours, theirs, more_is_better=False) == pytest.approx([3.0, 1 / 3, 0.8])
    assert ratios([None, 2.0, 1.0], [1.0, 1.0, None], more_is_better=True) == [2.0]


def test_a_comparison_in_words_and_as_json():
    """Ahead is ahead: more tokens a second, or less time."""
    ours = [one(output_tokens_per_s=rate, total_s=100 / rate) for rate in (10.0, 30.0, 20.0)]
    theirs = [one(output_tokens_per_s=10.0, total_s=10.0, ttft_s=None) for _ in range(3)]
    servers = [{"url": f"http://{name}", "model": "m", "max_model_len": None} for name in "xy"]
    report = Report(servers, 1, 3, {"W1": Outcome((ours, theirs)), "W4": Outcome(([], []), "it is long")})
    lines = {line[2:27].strip(): line[27:].split() for line in report.as_text().splitlines()}
    assert lines["output tokens/s"] == ["20.0", "10.0", "2.00×", "1.00", "to", "3.00"]
    assert lines["total time, s"] == ["5.00", "10.0", "2.00×", "1.00", "to", "3.00"]
    assert lines["time to first token, s"] == ["1.00", "–"] and lines["tokens in"] == ["10", "10"]
    found = report.as_json()["workloads"]
    assert found["W1"]["ratios"]["total_s"] == pytest.approx({"median": 2.0, "min": 1.0, "max": 3.0})
    assert "ttft_s" not in found["W1"]["ratios"] and found["W4"]["skipped"] == "it is long"
