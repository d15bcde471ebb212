"""Requests that read pages of others: followers, twins that overtake, choices of one prompt (A22)."""

import weakref

import pytest
from fakes import Harness, greedy, last_plan, logged, prompt

from engine.request import Status
from engine.sampling_params import SamplingParams


def test_followers_in_the_leaders_step_read_its_pages():
    harness = logged(block_size=4, max_num_batched_tokens=100)
    for number in range(3):
        harness.add(f"r{number}", prompt(14), greedy(3))
    harness.step()
    assert [row.num_computed for row in last_plan(harness).new_rows] == [0, 12, 12]
    assert sorted(last_plan(harness).num_tokens) == [2, 2, 14] and not last_plan(harness).copies
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
    assert len(last_plan(harness).new_rows) == 3
    harness.run()


def test_a_choice_held_behind_its_prompt_does_not_expire():
    """The request is being served: its deadline in the queue has been met by the first choice."""
    harness = Harness(block_size=4, max_num_batched_tokens=4)
    deadline = harness.now + 2
    for index in range(3):
        harness.add(f"c{index}", prompt(60), greedy(3), group="g", batch="g", index=index, deadline=deadline)
    harness.run(seconds_a_step=1.0)
    assert harness.now > deadline + 5
    for index in range(3):
        harness.assert_sequential(f"c{index}")


def test_choices_that_nobody_computes_expire_together():
    harness = Harness(block_size=4, max_num_seqs=1)
    harness.add("long", prompt(4, 500), greedy(30))
    for index in range(12):
        harness.add(f"c{index}", prompt(12), greedy(3), group="g", index=index, deadline=harness.now + 3)
    harness.run(seconds_a_step=1.0)
    assert [harness.results[f"c{index}"].finish_reason for index in range(12)] == ["error"] * 12
    harness.assert_sequential("long")
    harness.assert_idle()


def test_a_finished_request_is_not_kept_until_its_deadline():
    harness = Harness(block_size=4)
    harness.add("r", prompt(9), greedy(2), deadline=harness.now + 1e6)
    kept = weakref.ref(harness.core.scheduler.requests["r"])
    harness.run()
    assert kept() is None
