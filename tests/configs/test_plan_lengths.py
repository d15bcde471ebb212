"""Lengths of requests: what a trace may look like, and what is assumed without one."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import SettingsError
from configs.plan_lengths import Lengths, assumed_lengths, read_lengths


def trace(folder: Path, *records: object) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
        {"usage": {"prompt_tokens": 100, "completion_tokens": 20}, "id": "cmpl-1", "object": "text_completion"},
        {"timestamp": 27482, "input_length": 100, "output_length": 20, "hash_ids": [1, 2]},
        {"logger": "octavo.access", "prompt_tokens": 100, "cached_tokens": 64, "generated_tokens": 20, "sequences": 1},
    ],
    ids=["usage", "answer", "mooncake", "log"],
)
def test_one_record_of_each_kind(record: dict[str, object], tmp_path: Path) -> None:
    assert read_lengths(trace(tmp_path, record)).tokens == (120,)


def test_lines_that_are_no_requests_are_passed_over(tmp_path: Path) -> None:
    """Those of a server's log, and requests for several sequences, of which it has the sum alone."""
    several = {"prompt_tokens": 5, "generated_tokens": 90, "sequences": 3}
    one = {"prompt_tokens": 7, "generated_tokens": 2, "sequences": 1}
    path = trace(tmp_path, "", "Uvicorn running", {"message": "loading"}, [1, 2], several, one, "[" * 100_000, '{"a": ')
    found = read_lengths(path)
    assert found.tokens == (9,) and found.source == f"{path}: 1 request; 6 other lines passed over"


def test_requests_that_did_not_come_to_their_end_are_no_lengths(tmp_path: Path) -> None:
    """In Octavo's log. What others call a status is theirs."""
    line = {"prompt_tokens": 100, "generated_tokens": 20, "sequences": 1, "status": 200, "finish_reason": "stop"}
    changes: list[dict[str, object]] = [{}, {"finish_reason": "length", "generated_tokens": 30}]
    changes += [{"status": 499}, {"finish_reason": "abort"}, {"finish_reason": "error"}, {"status": 500}]
    path = trace(tmp_path, *(line | change for change in changes))
    found = read_lengths(path)
    assert found.tokens == (120, 130) and found.source == f"{path}: 2 requests; 4 other lines passed over"
    other = {"prompt_tokens": 1, "completion_tokens": 2, "status": "ok", "finish_reason": "tool_calls"}
    assert read_lengths(trace(tmp_path, other)).source == f"{path}: 1 request"


def test_a_byte_order_mark_costs_no_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 1, "output_length": 2}\n' * 2, encoding="utf-8-sig")
    assert read_lengths(str(path)).tokens == (3, 3)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "has no line that is a JSON object with prompt_tokens and completion_tokens, or"),
        ([{"tokens": 5}], "has no line that is a JSON object"),
        ([{"prompt_tokens": 0, "completion_tokens": 0}], "has no line"),
        ([{}, {"prompt_tokens": -1, "completion_tokens": 5}], "line 2: prompt_tokens must be a count of tokens"),
        ([{"prompt_tokens": 1, "completion_tokens": "9"}], "line 1: completion_tokens must be a count"),
        ([{"prompt_tokens": 1, "completion_tokens": True}], "completion_tokens must be a count"),
        ([{"prompt_tokens": 1, "completion_tokens": 2**31}], "completion_tokens must be a count"),
        ([{"input_length": 1.5, "output_length": 2}], "input_length must be a count of tokens, got 1.5"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_one_sentence(records: list[object], words: str, tmp_path: Path) -> None:
    path = trace(tmp_path, *records)
    with pytest.raises(SettingsError) as caught:
        read_lengths(path)
    message = str(caught.value)
    assert message.startswith(f"--lengths {path}") and words in message and message.endswith(".")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("several", [True, False])
def test_json_that_is_not_a_line_for_each_request_gets_a_hint(
    several: bool, indent: int | None, tmp_path: Path
) -> None:
    record = {"usage": {"prompt_tokens": 1, "completion_tokens": 2}, "id": "a"}
    if not several and indent is None:
        assert read_lengths(trace(tmp_path, record)).tokens == (3,)
        return
    path = trace(tmp_path, json.dumps([record, record] if several else record, indent=indent))
    with pytest.raises(SettingsError, match=r"each must stand on a line of its own, without a list around them\.$"):
        read_lengths(path)


@pytest.mark.parametrize("path", ["/nowhere", "/dev/zero", "~nobody-here/x"])
def test_files_that_cannot_be_read(path: str) -> None:
    """`test_files` has the rest."""
    with pytest.raises(SettingsError, match=f"^--lengths {path} "):
        read_lengths(path)


@given(st.lists(st.integers(1, 10**6), min_size=1), st.sampled_from([0.01, 0.5, 0.95, 1.0]))
def test_a_quantile_is_the_shortest_that_enough_do_not_exceed(tokens: list[int], share: float) -> None:
    lengths = Lengths(tuple(sorted(tokens)), "")
    found = lengths.quantile(share)
    assert sum(count <= found for count in tokens) >= share * len(tokens) - 1e-6
    assert found == min(tokens) or sum(count < found for count in tokens) < share * len(tokens)


def test_known_quantiles() -> None:
    lengths = Lengths(tuple(range(1, 101)), "")
    assert (lengths.p50, lengths.p95, lengths.mean) == (50, 95, 50.5)


def test_what_is_assumed_is_what_is_stated() -> None:
    lengths = assumed_lengths()
    assert (lengths.p50, lengths.p95) == (1024, 4096)
    assert "half at most 1,024 tokens, 95 % at most 4,096" in lengths.source
    sigma = math.log(4) / 1.6448536
    assert lengths.mean == pytest.approx(1024 * math.exp(sigma**2 / 2), rel=0.01), "the mean of a log-normal"


def test_a_window_cuts(tmp_path: Path) -> None:
    lengths = Lengths((10, 20, 30, 40), "x").within(20)
    assert lengths == Lengths((10, 20, 20, 20), "x", num_cut=2)
