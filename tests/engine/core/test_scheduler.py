"""Rules of the scheduler, one at a time."""

import pytest
from fakes import EOS, Harness, sequential

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.messages import StepPlan
from engine.request import Status
from engine.sampling_params import SamplingParams


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def greedy(max_tokens: int | None, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def logged(**settings: object) -> Harness:
    harness = Harness(**settings)
    harness.executor.keep_log = True
    return harness


def last(harness: Harness) -> StepPlan:
    return harness.executor.log[-1]


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


# -------------------------------------------------------------------- budget and chunks
def test_decode_rows_come_first_and_prompts_share_what_is_left():
    harness = logged(max_num_batched_tokens=10)
    harness.add("one", prompt(4), greedy(20))
    harness.step()
    harness.add("two", prompt(30, 500), greedy(5))
    for expected in ([1, 9], [1, 9], [1, 9], [1, 3], [1, 1]):
        harness.step()
        assert last(harness).num_tokens == expected and last(harness).total_tokens <= 10
    assert [plan.samples for plan in harness.executor.log[1:6]] == [[True, False]] * 3 + [[True, True]] * 2
    harness.run()
    for request_id in ("one", "two"):
        harness.assert_sequential(request_id)


def test_more_decodes_than_budget_still_progress():
    harness = Harness(max_num_batched_tokens=3, max_num_seqs=8)
    for number in range(8):
        harness.add(f"r{number}", prompt(2, 100 * number), greedy(6))
    harness.run()
    for number in range(8):
        harness.assert_sequential(f"r{number}")


def test_an_urgent_prompt_leaves_the_others_their_decodes():
    harness = logged(max_num_batched_tokens=10)
    harness.add("chat", prompt(4), greedy(20))
    harness.step()
    harness.add("urgent", prompt(40, 500), greedy(1), priority=-1)
    for _ in range(3):
        harness.step()
        assert last(harness).num_tokens == [1, 9]
    harness.run()


def test_a_short_prompt_rides_along_with_a_long_one():
    harness = logged(max_num_batched_tokens=16, num_blocks=200)
    harness.add("long", prompt(300), greedy(1))
    harness.step()
    harness.add("short", prompt(5, 1000), greedy(1))
    harness.add("other long", prompt(300, 2000), greedy(1))
    harness.step()
    assert sorted(last(harness).num_tokens) == [5, 11]
    harness.step()
    assert last(harness).num_tokens == [16]  # two long prompts do not halve each other's speed
    harness.run()


def test_a_waiting_request_before_the_long_one_gets_its_half():
    harness = logged(max_num_batched_tokens=16, num_blocks=200)
    harness.add("long", prompt(300), greedy(1))
    harness.step()
    harness.add("urgent", prompt(100, 1000), greedy(1), priority=-1)
    harness.step()
    assert sorted(last(harness).num_tokens) == [8, 8]
    harness.step()
    assert last(harness).slots == [harness.scheduler.requests["urgent"].slot]
    harness.run()


def test_priorities_then_arrival():
    harness = Harness(max_num_seqs=1)
    for request_id, priority in (("first", 0), ("second", 0), ("late but urgent", -5), ("patient", 3)):
        harness.add(request_id, prompt(4), greedy(1), priority=priority)
    ends = []
    while harness.core.has_work:
        ends += [output.request_id for output in harness.step()]
    assert ends == ["late but urgent", "first", "second", "patient"]


# -------------------------------------------------------------------- sharing
def test_followers_in_the_leaders_step_read_its_pages():
    harness = logged(block_size=4, max_num_batched_tokens=100)
    for number in range(3):
        harness.add(f"r{number}", prompt(14), greedy(3))
    harness.step()
    assert [row.num_computed for row in last(harness).new_rows] == [0, 12, 12]
    assert sorted(last(harness).num_tokens) == [2, 2, 14] and not last(harness).copies
    harness.run()
    for number in range(3):
        harness.assert_sequential(f"r{number}")


def test_a_waiting_request_is_matched_again_at_each_attempt():
    harness = Harness(block_size=4, max_num_seqs=1)
    harness.add("first", prompt(12), greedy(2))
    second = harness.add("second", prompt(12), greedy(2))
    harness.run()
    assert second.cached_tokens == 11


def test_a_running_prompt_skips_what_another_has_computed():
    """An urgent twin overtakes a half-computed prompt, which then takes over its pages."""
    harness = logged(block_size=4, max_num_batched_tokens=8)
    slow = harness.add("slow", prompt(60), greedy(3))
    harness.step()
    harness.step()
    fast = harness.add("fast", prompt(60), greedy(3), priority=-1)
    harness.run()
    for request_id in ("slow", "fast"):
        harness.assert_sequential(request_id)
    skips = [event for event in harness.core.events(1000) if event["reason"] == "ahead"]
    assert skips and {event["request_id"] for event in skips} == {"slow"}
    reentries = [row for plan in harness.executor.log for row in plan.new_rows if row.slot in plan.freed_slots]
    assert [row.request_id for row in reentries] == ["slow"] * len(skips)
    assert slow.cached_tokens == sum(event["tokens"] for event in skips)
    stats = harness.core.stats()
    assert stats.prefix_hits_total == slow.cached_tokens + fast.cached_tokens
    assert stats.prefill_tokens_total + stats.prefix_hits_total == stats.prefix_queries_total == 120


def test_a_row_is_told_anew_only_when_it_has_skipped():
    harness = logged(block_size=4, max_num_batched_tokens=8)
    harness.add("slow", prompt(80), greedy(3))
    harness.step()
    harness.add("fast", prompt(30), greedy(1), priority=-1)
    harness.run()
    harness.assert_sequential("slow")
    rows = [row for plan in harness.executor.log for row in plan.new_rows]
    assert [(row.request_id, row.num_computed) for row in rows] == [("slow", 0), ("fast", 12), ("slow", 28)]
    assert len(harness.executor.log) >= 1 + 3 + 7


@pytest.mark.parametrize("budget", [2, 64])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_a22_choices_compute_the_prompt_once(depth: int, length: int, budget: int):
    harness = Harness(block_size=4, depth=depth, max_num_batched_tokens=budget)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    for index in range(4):
        harness.add(f"c{index}", prompt(length), params, group="g", index=index)
    harness.run()
    harness.assert_idle()
    results = [harness.results[f"c{index}"] for index in range(4)]
    for index in range(4):
        harness.assert_sequential(f"c{index}")
    assert len({tuple(result.token_ids) for result in results}) == 4
    assert [result.cached_tokens for result in results] == [0] + [length - 1] * 3
    assert harness.core.stats().prefill_tokens_total == length + 3


@pytest.mark.parametrize("when", ["waiting", "prefilling"])
def test_the_next_choice_goes_on_when_the_leader_is_aborted(when: str):
    harness = Harness(max_num_batched_tokens=4)
    for index in range(3):
        harness.add(f"c{index}", prompt(20), greedy(3), group="g", index=index)
    if when == "prefilling":
        harness.step()
        assert harness.scheduler.requests["c0"].status is Status.RUNNING
    assert [harness.scheduler.requests[f"c{index}"].status for index in (1, 2)] == [Status.WAITING] * 2
    harness.core.abort(["c0"])
    harness.run()
    for request_id in ("c1", "c2"):
        harness.assert_sequential(request_id)
    assert harness.results["c2"].cached_tokens == 19


def test_the_next_choice_goes_on_when_the_leader_fails():
    harness = Harness()
    harness.executor.row_error = lambda request_id, generated: "broken" if request_id == "c0" else None
    for index in range(2):
        harness.add(f"c{index}", prompt(20), greedy(3), group="g", index=index)
    harness.run()
    assert harness.results["c0"].error == "broken"
    harness.assert_sequential("c1")


def test_without_a_cache_choices_do_not_wait_for_one_another():
    harness = logged(prefix_caching=False)
    for index in range(3):
        harness.add(f"c{index}", prompt(5), greedy(3), group="g", index=index)
    harness.step()
    assert len(last(harness).new_rows) == 3
    harness.run()


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
    assert len(last(harness).new_rows) == 4
    harness.run()


def test_preemption_takes_the_last_in_order_and_keeps_its_place():
    harness = logged(num_blocks=9, block_size=4, prefix_caching=False)
    for number in range(3):
        harness.add(f"r{number}", prompt(9, 100 * number), greedy(20))
    harness.step()
    assert len(last(harness).new_rows) == 2  # the third lacks its page for generation
    harness.run()
    for number in range(3):
        harness.assert_sequential(f"r{number}")
    victims = [event["request_id"] for event in harness.core.events(1000) if event["kind"] == "preemption"]
    assert victims and set(victims) <= {"r1", "r2"}
    assert harness.results["r0"].num_preemptions == 0
    ends = {request_id: result.steps[-1] for request_id, result in harness.results.items()}
    assert ends["r0"] < ends["r1"] < ends["r2"]


def test_nobody_yields_to_a_later_request():
    """The last in order needs a page itself: it goes, the others stay."""
    harness = Harness(num_blocks=5, block_size=4, prefix_caching=False)
    harness.add("first", prompt(7), greedy(6))
    second = harness.add("second", prompt(6, 500), greedy(9))
    harness.run()
    events = [e for e in harness.core.events(1000) if e["kind"] == "preemption"]
    assert [(e["request_id"], e["reason"], e["for_request_id"]) for e in events] == [
        ("second", "no_pages_left", "second")
    ]
    assert harness.core.stats().preemptions_total == {"no_pages_left": 1}
    assert second.num_preemptions == 1
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


def test_a_preempted_request_finds_its_pages_again():
    harness = Harness(num_blocks=10, block_size=4)
    harness.add("older", prompt(12), greedy(12))
    younger = harness.add("younger", prompt(12, 500), greedy(12))
    harness.run()
    assert younger.num_preemptions == 1
    stats = harness.core.stats()
    assert 0 < stats.recomputed_tokens_total < 12
    assert stats.prefill_tokens_total == stats.prefix_queries_total == 24
    harness.assert_sequential("younger")


def test_nobody_is_admitted_in_a_step_that_preempts_nor_past_the_victim():
    harness = logged(num_blocks=10, block_size=4, prefix_caching=False)
    harness.add("older", prompt(12), greedy(20))
    harness.add("younger", prompt(12, 500), greedy(20))
    while not harness.core.stats().preemptions_total:
        harness.step()
    harness.add("newcomer", prompt(1, 900), greedy(1))
    while harness.scheduler.requests["younger"].status is Status.WAITING:
        assert harness.scheduler.requests["newcomer"].status is Status.WAITING
        harness.step()
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
    assert last(harness).num_tokens == [16]
    harness.run()


# -------------------------------------------------------------------- ends
def test_a_queued_request_past_its_deadline_fails_with_words():
    harness = Harness(max_num_seqs=1)
    harness.add("busy", prompt(4), greedy(20))
    late = harness.add("late", prompt(4), greedy(5), deadline=harness.now + 3)
    harness.add("patient", prompt(4), greedy(5), deadline=harness.now + 300)
    for _ in range(5):
        harness.step()
        harness.now += 1
    assert late.finish_reason == "error" and "4.0 s" in (late.error or "") and late.token_ids == []
    harness.run()
    harness.assert_sequential("patient")


def test_a_deadline_does_not_end_what_has_started():
    harness = Harness(num_blocks=10, block_size=4)
    harness.add("older", prompt(12), greedy(12))
    younger = harness.add("younger", prompt(12, 500), greedy(12), deadline=harness.now + 2)
    while harness.core.has_work:
        harness.step()
        harness.now += 1
    assert younger.num_preemptions == 1
    harness.assert_sequential("younger")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_abort_in_any_state_gives_everything_back(depth: int, steps: int):
    harness = Harness(max_num_batched_tokens=8, depth=depth)
    for number in range(3):
        harness.add(f"r{number}", prompt(12, 100 * number), greedy(30))
    for _ in range(steps):
        harness.step()
    harness.core.abort(["r0", "r1", "unknown"], "stop")
    harness.core.abort(["r0"])
    harness.core.check()
    harness.run()
    harness.assert_sequential("r2")
    harness.assert_idle()
    for number in range(2):
        assert harness.results[f"r{number}"].finish_reason is None


def test_a_row_that_fails_takes_nobody_with_it():
    harness = Harness()
    harness.executor.row_error = lambda request_id, generated: (
        "not finite" if (request_id, generated) == ("bad", 2) else None
    )
    bad = harness.add("bad", prompt(10), greedy(9))
    harness.add("good", prompt(10), greedy(9))
    harness.run()
    assert (bad.finish_reason, bad.error, len(bad.token_ids)) == ("error", "not finite", 2)
    harness.assert_sequential("good")
    harness.assert_idle()


# -------------------------------------------------------------------- late results
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


# -------------------------------------------------------------------- numbers
def test_counters_tell_what_was_computed():
    harness = Harness(block_size=4)
    harness.complete(prompt(10), greedy(5))
    harness.complete(prompt(10), greedy(5))
    stats = harness.core.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total, stats.prefill_tokens_total) == (20, 9, 11)
    assert (stats.generated_tokens_total, stats.recomputed_tokens_total, stats.copies_total) == (10, 0, 1)
    assert stats.steps_total == 10 and stats.scheduled_tokens == 1


def test_waiting_tokens_follow_the_queue():
    harness = Harness(max_num_seqs=1)
    for number, length in enumerate((5, 7, 9)):
        harness.add(f"r{number}", prompt(length), greedy(2))
    stats = harness.core.stats()
    assert (stats.waiting, stats.waiting_tokens) == (3, 21)
    harness.step()
    stats = harness.core.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (1, 2, 16)
    harness.core.abort(["r2"])
    assert harness.core.stats().waiting_tokens == 7
    harness.run()
