"""Refreshes: what is computed in full precision, when, in whose pages, and what it may not change for others."""

from collections import Counter

import pytest
from fakes import EOS, Harness, greedy, last_plan, logged, prompt, sequential

from engine.messages import StepPlan
from engine.request import Status
from engine.sampling_params import SamplingParams


def refreshed_chunks(plans: list[StepPlan]) -> list[tuple[int, int]]:
    """(step, tokens) of every row in full precision."""
    return [(plan.step, plan.num_tokens[plan.slots.index(slot)]) for plan in plans for slot in plan.refreshed_slots]


def kinds(harness: Harness) -> Counter[str]:
    return Counter(event["kind"] for event in harness.core.events(10_000))


def alone(tokens: list[int], params: SamplingParams, interval: int) -> list[int]:
    return sequential(tokens, params, 0, 10_000, interval)[0]


def step_until(harness: Harness, condition) -> None:
    for _ in range(1000):
        if condition():
            return
        harness.step()
    raise AssertionError("it never came to that")


# ------------------------------------------------------------------ the rule
def test_all_but_the_last_token_is_computed_anew_each_time():
    harness = logged(refresh_interval=4)
    harness.add("r", prompt(5), greedy(11))
    harness.run()
    harness.assert_sequential("r")
    log = harness.executor.log
    assert [sum(plan.num_tokens) for plan in log] == [5, 1, 1, 1, 8, 1, 1, 1, 1, 12, 1, 1, 1]
    assert refreshed_chunks(log) == [(5, 5 + 4 - 1), (10, 5 + 8 - 1)]
    stats = harness.core.stats()
    assert (stats.refreshes_total, stats.refreshed_tokens_total) == (2, 8 + 12)
    harness.assert_idle()


def test_the_fake_model_tells_a_refresh():
    """Or else none of this would mean anything: with another interval, or none, answers differ."""
    answers = [tuple(sequential(prompt(5), greedy(30), 0, 10_000, interval)[0]) for interval in (None, 4, 5, 8, 31)]
    assert answers[0] == answers[-1] and len(set(answers)) == 4


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 2, 4, 7])
def test_company_chunks_and_late_results_change_nothing(interval: int, depth: int):
    for budget in (1, 3, 5, 64):
        harness = Harness(num_blocks=24, refresh_interval=interval, depth=depth, max_num_batched_tokens=budget)
        for number in range(5):
            harness.add(f"r{number}", prompt(5 + 3 * number), greedy(10 + number))
        harness.run()
        for number in range(5):
            harness.assert_sequential(f"r{number}")
        assert harness.core.stats().refreshes_total == sum((10 + number - 1) // interval for number in range(5))
        harness.assert_idle()


@pytest.mark.parametrize("window", [1, 3, 9])
def test_layers_with_windows_keep_what_rows_see(window: int):
    harness = Harness(refresh_interval=6, max_num_batched_tokens=5, windows=[(window, 40)])
    for number in range(3):
        harness.add(f"r{number}", prompt(15 + number), greedy(20))
    harness.run()
    for number in range(3):
        harness.assert_sequential(f"r{number}")
    assert harness.core.stats().refreshes_total == 9
    harness.assert_idle()


# ------------------------------------------------------------------ ends at the boundary
def test_a_sequence_that_ends_when_it_would_be_refreshed_is_not():
    harness = logged(refresh_interval=4)
    first = harness.complete(prompt(5), greedy(4))
    assert first.finish_reason == "length" and not refreshed_chunks(harness.executor.log)
    again = harness.complete(prompt(5) + first.token_ids, greedy(1))
    assert again.cached_tokens == 8, "what it had computed is published as ever"
    stats = harness.core.stats()
    assert stats.refreshes_total == kinds(harness)["refresh"] == 0


def test_a_stop_token_when_a_refresh_is_due():
    params = SamplingParams(temperature=0.0, max_tokens=500)
    tokens, reason = sequential(prompt(5), params, 0, 10_000)
    assert reason == "stop" and tokens[-1] == EOS
    harness = Harness(refresh_interval=len(tokens), num_blocks=200, depth=2)
    harness.add("r", prompt(5), params)
    harness.run()
    harness.assert_sequential("r")
    assert harness.core.stats().refreshes_total == 0
    harness.assert_idle()


@pytest.mark.parametrize("window", range(20, 30))
def test_the_end_of_the_window_at_and_around_a_refresh(window: int):
    harness = Harness(refresh_interval=4, max_model_len=window)
    result = harness.complete(prompt(9), greedy(None))
    harness.assert_sequential("r0")
    assert result.finish_reason == "length" and len(result.token_ids) == window - 9
    assert harness.core.stats().refreshes_total == (window - 9 - 1) // 4


def test_a_prompt_that_generates_nothing_is_not_refreshed():
    harness = Harness(refresh_interval=1)
    result = harness.complete(prompt(9), SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert result.finish_reason == "length" and harness.core.stats().refreshes_total == 0
    harness.assert_sequential("r0")


# ------------------------------------------------------------------ pages
def test_refreshed_pages_are_published_neither_then_nor_at_the_end():
    harness = Harness(block_size=4, refresh_interval=4)
    first = harness.complete(prompt(8), greedy(14))
    before = harness.core.stats().pages_cached
    assert before == 3, "of 8 + 4 - 1 tokens, which were confirmed before the first refresh"
    turn = harness.complete(prompt(8) + first.token_ids, greedy(2))
    assert turn.cached_tokens == 8 + 4 - 1
    harness.assert_sequential("r1")


def test_pages_that_others_read_stay_as_they_are():
    harness = Harness(block_size=4, refresh_interval=5)
    harness.add("first", prompt(12), greedy(30))
    harness.step()
    harness.add("second", [*prompt(12), 3], greedy(4))
    step_until(harness, lambda: harness.core.stats().refreshes_total)
    shared = [block for block in harness.kv.pool.blocks if block.parent is not None]
    contents = {block.id: list(harness.executor.cells[block.id]) for block in shared}
    assert len(shared) >= 3
    step_until(harness, lambda: harness.core.stats().refreshes_total == 3)
    for block in shared:
        count = len(block.tokens)
        assert harness.executor.cells[block.id][:count] == contents[block.id][:count]
    third = harness.add("third", [*prompt(12), 3, 4], greedy(4))
    harness.run()
    assert third.cached_tokens == 13
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


def test_what_a_refreshed_sequence_says_is_not_found_by_another():
    harness = Harness(block_size=4, refresh_interval=4)
    slow = harness.add("slow", prompt(8), greedy(40))
    step_until(harness, lambda: len(slow.token_ids) == 23)
    twin = harness.complete(prompt(8) + slow.token_ids, greedy(12))
    assert twin.cached_tokens == 8 + 4 - 1
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


# ------------------------------------------------------------------ what is counted and told
def test_a_refresh_is_neither_a_lookup_nor_a_prefill_nor_a_recomputation():
    harness = Harness(block_size=4, refresh_interval=4)
    result = harness.add("r", prompt(9), greedy(10))
    harness.add("other", prompt(9), greedy(1))
    harness.run()
    stats, seen = harness.core.stats(), kinds(harness)
    assert stats.refreshes_total == seen["refresh"] == 2
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (18, 8)
    assert stats.prefill_tokens_total == 10 and stats.recomputed_tokens_total == 0
    assert stats.preemptions_total == {} and result.num_preemptions == 0
    assert seen["hit"] + seen["miss"] == 2 and result.cached_tokens == 0
    assert stats.refreshed_tokens_total == 12 + 16


def test_events_say_what_a_refresh_gave_back_and_took():
    harness = Harness(block_size=4, refresh_interval=4)
    harness.complete(prompt(9), greedy(6))
    events = harness.core.events(100)
    place = next(place for place, event in enumerate(events) if event["kind"] == "refresh")
    refresh, following = events[place : place + 2]
    assert (refresh["request_id"], refresh["reason"], refresh["pages"], refresh["tokens"]) == ("r0", "interval", 3, 12)
    assert (following["kind"], following["reason"], following["blocks"]) == ("allocation", "refresh", 3)


def test_what_a_preemption_has_computed_again_is_told_from_refreshes():
    """Preempted with 18 tokens computed, 16 of them refreshed: those are computed again because of the preemption."""
    harness = Harness(block_size=4, refresh_interval=4, prefix_caching=False)
    result = harness.add("r", prompt(9), greedy(14))
    step_until(harness, lambda: len(result.token_ids) == 10)
    request = harness.scheduler.requests["r"]
    computed = request.num_computed
    assert (computed, request.num_refreshed) == (18, 16)
    harness.scheduler._preempt(request, request)
    before = harness.core.stats()
    harness.run()
    harness.assert_sequential("r")
    stats = harness.core.stats()
    assert stats.recomputed_tokens_total == computed
    assert stats.refreshed_tokens_total - before.refreshed_tokens_total == 9 + 12 - 1, "of the refresh that followed"
    assert stats.prefill_tokens_total == 9


# ------------------------------------------------------------------ turns
def test_one_scratch_is_used_in_turns_and_within_the_budget():
    harness = logged(refresh_interval=10, max_num_batched_tokens=8)
    for number in range(3):
        harness.add(f"r{number}", prompt(6, 100 * number), greedy(24))
    harness.run()
    for number in range(3):
        harness.assert_sequential(f"r{number}")
    assert all(plan.total_tokens <= 8 for plan in harness.executor.log)
    waits = [event for event in harness.core.events(1000) if event["kind"] == "wait" and event["reason"] == "refresh"]
    assert {event["request_id"] for event in waits} == {"r1", "r2"}


def test_several_short_refreshes_share_a_step():
    """One after another through the scratch: each is over before the next begins."""
    harness = logged(refresh_interval=4, max_num_batched_tokens=64)
    for number in range(3):
        harness.add(f"r{number}", prompt(5, 100 * number), greedy(6))
    harness.run()
    for number in range(3):
        harness.assert_sequential(f"r{number}")
    assert [count for _, count in refreshed_chunks(harness.executor.log)] == [8, 8, 8]
    assert len({step for step, _ in refreshed_chunks(harness.executor.log)}) == 1


def test_others_go_on_while_a_long_sequence_is_refreshed():
    harness = logged(refresh_interval=8, max_num_batched_tokens=6, num_blocks=100)
    long = harness.add("long", prompt(60), greedy(20))
    step_until(harness, lambda: len(long.token_ids) == 6)
    short = harness.add("short", prompt(2, 500), greedy(7))
    step_until(harness, lambda: len(long.token_ids) == 8 and short.token_ids)
    known, before = len(long.token_ids), harness.num_steps
    while len(long.token_ids) == known:
        harness.step()
    assert harness.num_steps - before > 67 // 6
    assert [step for step in short.steps if step > before] == list(range(before + 1, short.steps[-1] + 1))
    harness.run()
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


def test_a_short_refresh_rides_along_with_a_long_prompt():
    """Half of a step is kept for those that fit into it: 8 of 9 tokens are computed in full precision."""
    harness = logged(refresh_interval=4, max_num_batched_tokens=16, num_blocks=100)
    long = harness.add("long", prompt(120), greedy(2))
    short = harness.add("short", prompt(5, 500), greedy(6))
    step_until(harness, lambda: len(short.token_ids) == 4)
    harness.step()
    assert refreshed_chunks([last_plan(harness)]) == [(harness.executor.last_step, 8)]
    harness.step()
    assert len(short.token_ids) == 5, "it has its row in the next step, whatever prompt is before it"
    harness.run()
    assert short.steps[-1] < long.steps[0]
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


def test_nobody_is_admitted_past_one_that_waits_for_its_turn():
    """Its pages are not given to newcomers; these wait for a bounded number of steps."""
    harness = Harness(refresh_interval=8, max_num_batched_tokens=8, num_blocks=100)
    for number, length in enumerate((60, 4)):
        harness.add(f"r{number}", prompt(length, 100 * number), greedy(20))
    waiting = harness.scheduler.requests["r1"]
    step_until(harness, lambda: waiting.wait_reason == "refresh")
    harness.add("newcomer", prompt(2, 900), greedy(3))
    newcomer, steps = harness.scheduler.requests["newcomer"], 0
    while waiting.status is Status.WAITING:
        assert newcomer.status is Status.WAITING
        harness.step()
        steps += 1
    assert 1 < steps < 67 // 8
    harness.run()
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


def test_one_that_has_no_pages_for_its_refresh_is_not_overtaken():
    """It shared its prompt with another and needs pages of its own, which are not there until that one ends."""
    harness = Harness(block_size=4, num_blocks=13, refresh_interval=8)
    first = harness.add("first", prompt(24), greedy(12))
    step_until(harness, lambda: len(first.token_ids) == 5)
    second = harness.add("second", prompt(24), greedy(7))
    step_until(harness, lambda: len(first.token_ids) == 8)
    late = harness.add("late", prompt(3, 900), greedy(3))
    harness.step()
    request = harness.scheduler.requests["first"]
    assert request.wait_reason == "reserved" and harness.kv.num_available > 2, "the newcomer would fit"
    harness.run()
    for request_id in harness.asked:
        harness.assert_sequential(request_id)
    assert second.steps[-1] < late.steps[0] < first.steps[8], "both in the step after, the refresh first"


# ------------------------------------------------------------------ amid a refresh
def amid(harness: Harness, request_id: str) -> bool:
    current = harness.scheduler.refreshes.current
    return current is not None and current.request_id == request_id


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_amid_its_refresh(depth: int):
    harness = Harness(refresh_interval=5, max_num_batched_tokens=6, depth=depth)
    for number in range(3):
        harness.add(f"r{number}", prompt(14, 100 * number), greedy(14))
    for _ in range(3):
        step_until(harness, lambda: harness.scheduler.refreshes.current is not None)
        victim = harness.scheduler.refreshes.current
        harness.scheduler._preempt(victim, victim)
        harness.core.check()
        assert harness.scheduler.refreshes.current is None
        harness.step()
    harness.run()
    for number in range(3):
        harness.assert_sequential(f"r{number}")
    harness.assert_idle()


def test_pages_that_run_out_preempt_whoever_is_refreshed():
    """The real thing: an earlier sequence grows into the pages of a later one, in the midst of its refresh."""
    met = 0
    for length in range(8, 40):
        harness = Harness(block_size=2, num_blocks=34, refresh_interval=10, max_num_batched_tokens=4)
        harness.add("early", prompt(length, 500), greedy(60 - length))
        harness.add("late", prompt(10), greedy(30))
        while harness.core.has_work:
            was_amid = amid(harness, "late")
            known = harness.results["late"].num_preemptions
            harness.step()
            request = harness.scheduler.requests.get("late")
            met += was_amid and request is not None and request.num_preemptions > known
        for request_id in harness.asked:
            harness.assert_sequential(request_id)
    assert met > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_aborted_amid_its_refresh(depth: int):
    harness = Harness(refresh_interval=8, max_num_batched_tokens=6, depth=depth)
    for number in range(2):
        harness.add(f"r{number}", prompt(20, 100 * number), greedy(20))
    step_until(harness, lambda: amid(harness, "r0"))
    harness.core.abort(["r0"])
    harness.core.check()
    assert harness.scheduler.refreshes.current is None
    harness.run()
    harness.assert_sequential("r1")
    harness.assert_idle()


def test_aborted_while_it_waits_for_its_turn():
    harness = Harness(refresh_interval=8, max_num_batched_tokens=6)
    for number in range(2):
        harness.add(f"r{number}", prompt(20, 100 * number), greedy(20))
    waiting = harness.scheduler.requests["r1"]
    step_until(harness, lambda: waiting.wait_reason == "refresh")
    harness.core.abort(["r1"])
    harness.core.check()
    harness.run()
    harness.assert_sequential("r0")
    harness.assert_idle()


def test_a_step_that_breaks_amid_a_refresh_ends_everything():
    harness = Harness(refresh_interval=8, max_num_batched_tokens=6)
    harness.add("r", prompt(20), greedy(20))
    step_until(harness, lambda: amid(harness, "r"))
    harness.executor.break_at = harness.executor.last_step + 1
    with pytest.raises(RuntimeError, match="device is gone"):
        harness.step()
    assert harness.scheduler.refreshes.current is None and not harness.core.has_work
    harness.core.check()
    harness.assert_idle()


def test_a_row_that_fails_after_its_refresh():
    harness = Harness(refresh_interval=4)
    harness.executor.row_error = lambda request_id, generated: "broken" if generated == 5 else None
    result = harness.complete(prompt(9), greedy(20))
    assert result.error == "broken" and result.token_ids == alone(prompt(9), greedy(20), 4)[:5]
    harness.assert_idle()


@pytest.mark.parametrize("depth", [2, 3])
def test_preempted_while_the_token_that_makes_it_due_is_in_flight(depth: int):
    harness = Harness(refresh_interval=6, depth=depth)
    result = harness.add("r", prompt(9), greedy(20))
    harness.add("other", prompt(9, 500), greedy(20))
    request = harness.scheduler.requests["r"]
    step_until(harness, lambda: request.num_tokens == request.halts_at and request.num_in_flight)
    assert len(result.token_ids) < 6
    harness.scheduler._preempt(request, request)
    harness.core.check()
    harness.run()
    for request_id in harness.asked:
        harness.assert_sequential(request_id)
    assert harness.core.stats().refreshes_total == 2 * 3


@pytest.mark.parametrize("depth", [2, 3])
def test_with_overlap_no_row_is_planned_beyond_the_refresh(depth: int):
    harness = logged(refresh_interval=4, depth=depth)
    harness.add("r", prompt(5), greedy(9))
    harness.run()
    harness.assert_sequential("r")
    assert [sum(plan.num_tokens) for plan in harness.executor.log] == [5, 1, 1, 1, 8, 1, 1, 1, 1, 12, 1]
    assert harness.executor.max_unfinished == depth


# ------------------------------------------------------------------ other features
def test_choices_are_refreshed_each_for_itself():
    harness = Harness(block_size=4, refresh_interval=5, max_num_batched_tokens=16)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=13, ignore_eos=True)
    for index in range(4):
        harness.add(f"c{index}", prompt(14), params, group="g", index=index)
    harness.run()
    for index in range(4):
        harness.assert_sequential(f"c{index}")
    results = [harness.results[f"c{index}"] for index in range(4)]
    assert [result.cached_tokens for result in results] == [0] + [13] * 3
    assert harness.core.stats().refreshes_total == 8
    harness.assert_idle()


def test_log_probabilities_of_the_prompt_come_once():
    harness = Harness(refresh_interval=2, max_num_batched_tokens=5)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=0)
    harness.complete(prompt(12), params)
    harness.assert_sequential("r0")


def test_a_sequence_that_waits_for_its_refresh_has_no_deadline():
    harness = Harness(refresh_interval=8, max_num_batched_tokens=3)
    for number in range(3):
        harness.add(f"r{number}", prompt(20, 100 * number), greedy(20), deadline=harness.now + 50)
    harness.run(seconds_a_step=1.0)
    assert harness.now > 200
    for number in range(3):
        harness.assert_sequential(f"r{number}")


def test_without_the_interval_nothing_is_refreshed():
    harness = logged()
    harness.complete(prompt(5), greedy(40))
    assert not refreshed_chunks(harness.executor.log)
    stats = harness.core.stats()
    assert stats.refreshes_total == stats.refreshed_tokens_total == 0
    assert last_plan(harness).refreshed_slots == []
