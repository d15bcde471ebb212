"""What the scheduler puts into a step, how requests end, and what is counted."""

import pytest
from fakes import Harness, greedy, last_plan, logged, prompt


# -------------------------------------------------------------------- budget and chunks
def test_decode_rows_come_first_and_prompts_share_what_is_left():
    harness = logged(max_num_batched_tokens=10)
    harness.add("one", prompt(4), greedy(20))
    harness.step()
    harness.add("two", prompt(30, 500), greedy(5))
    for expected in ([1, 9], [1, 9], [1, 9], [1, 3], [1, 1]):
        harness.step()
        assert last_plan(harness).num_tokens == expected and last_plan(harness).total_tokens <= 10
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
        assert last_plan(harness).num_tokens == [1, 9]
    harness.run()


def test_a_short_prompt_rides_along_with_a_long_one():
    harness = logged(max_num_batched_tokens=16, num_blocks=200)
    harness.add("long", prompt(300), greedy(1))
    harness.step()
    harness.add("short", prompt(5, 1000), greedy(1))
    harness.add("other long", prompt(300, 2000), greedy(1))
    harness.step()
    assert sorted(last_plan(harness).num_tokens) == [5, 11]
    harness.step()
    assert last_plan(harness).num_tokens == [16]  # two long prompts do not halve each other's speed
    harness.run()


def test_a_waiting_request_before_the_long_one_gets_its_half():
    harness = logged(max_num_batched_tokens=16, num_blocks=200)
    harness.add("long", prompt(300), greedy(1))
    harness.step()
    harness.add("urgent", prompt(100, 1000), greedy(1), priority=-1)
    harness.step()
    assert sorted(last_plan(harness).num_tokens) == [8, 8]
    harness.step()
    assert last_plan(harness).slots == [harness.scheduler.requests["urgent"].slot]
    harness.run()


def test_priorities_then_arrival():
    harness = Harness(max_num_seqs=1)
    for request_id, priority in (("first", 0), ("second", 0), ("late but urgent", -5), ("patient", 3)):
        harness.add(request_id, prompt(4), greedy(1), priority=priority)
    ends = []
    while harness.core.has_work:
        ends += [output.request_id for output in harness.step()]
    assert ends == ["late but urgent", "first", "second", "patient"]


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


@pytest.mark.parametrize("share", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("kind", ["prompts", "choices"])
def test_an_answer_that_is_being_made_has_no_deadline(kind: str, share: bool):
    """Of a request with more sequences than there are slots, one after the other; those that arrive late as well."""
    harness = Harness(max_num_seqs=1, prefix_caching=share)
    deadline = harness.now + 3
    group = {"group": "many"} if kind == "choices" else {}
    several = [
        harness.add(f"many-{number}", prompt(4), greedy(6), batch="many", index=number, deadline=deadline, **group)
        for number in range(3)
    ]
    harness.step()
    several.append(harness.add("many-3", prompt(5), greedy(6), batch="many", deadline=deadline))
    other = harness.add("other", prompt(4), greedy(5), batch="another", deadline=deadline)
    while harness.core.has_work:
        harness.step()
        harness.now += 1
    assert [request.finish_reason for request in several] == ["length"] * 4
    assert other.finish_reason == "error"


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
