"""Which requests are taken in, and when: the door, the pages a prompt will need, overtaking (A17, A34)."""

import pytest
from fakes import Harness, greedy, last_plan, logged, prompt

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.request import Status


# -------------------------------------------------------------------- the door
def test_a17_a_prompt_must_leave_room_for_a_token():
    harness = Harness(max_model_len=20)
    for length in (20, 21, 500):
        with pytest.raises(ContextLengthExceeded) as refused:
            harness.add("r", prompt(length))
        assert refused.value.code == "context_length_exceeded"
        assert "20" in refused.value.message and str(length) in refused.value.message
    assert not harness.core.has_work
    assert len(harness.complete(prompt(19), greedy(50)).token_ids) == 1


def test_empty_prompts_and_ids_in_use_are_refused():
    harness = Harness()
    with pytest.raises(InvalidRequest, match="empty"):
        harness.add("r", [])
    harness.add("r", prompt(3))
    with pytest.raises(InvalidRequest, match="already open"):
        harness.add("r", prompt(3))
    harness.run()
    harness.add("r", prompt(3))  # the first has ended
    harness.run()


@pytest.mark.parametrize(("max_tokens", "expected"), [(3, 3), (15, 15), (16, 15), (10_000, 15), (None, 15)])
def test_a17_output_ends_by_length_at_the_limit_or_the_window(max_tokens: int | None, expected: int):
    result = Harness(max_model_len=20).complete(prompt(5), greedy(max_tokens))
    assert (len(result.token_ids), result.finish_reason) == (expected, "length")


def test_the_caller_keeps_its_prompt_list():
    harness, tokens = Harness(), prompt(5)
    harness.complete(tokens, greedy(4))
    assert tokens == prompt(5)


# -------------------------------------------------------------------- pages
def test_admission_counts_what_admitted_prompts_have_not_taken_yet():
    harness = Harness(num_blocks=20, block_size=4, max_num_batched_tokens=32, prefix_caching=False)
    harness.add("one", prompt(64), greedy(2))  # 17 blocks, 8 of them in the first step
    harness.step()
    assert harness.kv.num_available == 12
    harness.add("two", prompt(12, 500), greedy(8))  # 4 blocks: one more than are promised to nobody
    harness.add("three", prompt(7, 900), greedy(2))  # 2 blocks
    harness.step()
    assert harness.scheduler.requests["two"].status is Status.WAITING
    assert harness.scheduler.requests["three"].status is Status.RUNNING
    harness.run()
    assert harness.core.stats().preemptions_total == {}


def test_max_tokens_are_never_reserved():
    harness = logged(num_blocks=20, block_size=4)
    for number in range(4):
        harness.add(f"r{number}", prompt(8, 100 * number), greedy(72))
    harness.step()
    assert len(last_plan(harness).new_rows) == 4
    harness.run()


# -------------------------------------------------------------------- overtaking
def crowded(max_passed_over: int) -> Harness:
    """12 of 24 blocks are held for long; then a big request and small ones arrive."""
    harness = Harness(24, 4, max_passed_over=max_passed_over, prefix_caching=False, max_num_seqs=32)
    harness.add("holder", prompt(47), greedy(40))
    harness.step()
    harness.add("big", prompt(70, 500), greedy(2))
    return harness


def test_a34_small_requests_overtake_one_that_does_not_fit():
    harness = crowded(max_passed_over=64)
    for number in range(3):
        harness.add(f"small{number}", prompt(3, 1000 + 100 * number), greedy(2))
    harness.step()
    status = {request_id: request.status for request_id, request in harness.scheduler.requests.items()}
    assert status["big"] is Status.WAITING
    assert [status[f"small{number}"] for number in range(3)] == [Status.RUNNING] * 3
    assert harness.scheduler.requests["big"].passed_over == 1
    harness.run()
    harness.assert_sequential("big")


@pytest.mark.parametrize("limit", [0, 3])
def test_a34_overtaking_is_bounded(limit: int):
    harness = crowded(max_passed_over=limit)
    count = 0
    while harness.scheduler.requests["big"].status is Status.WAITING:
        harness.add(f"small{count}", prompt(3, 1000 + 10 * count), greedy(2))
        count += 1
        harness.step()
        assert count < 200
    overtakers = [result for result in harness.results.values() if result.steps and result.steps[0] < harness.num_steps]
    assert len(overtakers) == 1 + limit  # the holder and those let through
    harness.run()
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


def test_a_reserved_head_of_the_queue_does_not_slow_a_long_prompt():
    """Nobody may be admitted behind it, so nothing is kept for riders."""
    harness = Harness(40, 4, max_passed_over=0, prefix_caching=False, max_num_batched_tokens=16)
    harness.executor.keep_log = True
    harness.add("long", prompt(120), greedy(1))
    harness.step()
    harness.add("big", prompt(120, 500), greedy(1))
    harness.add("small", prompt(4, 900), greedy(1))
    harness.step()
    assert last_plan(harness).num_tokens == [16]
    harness.run()
