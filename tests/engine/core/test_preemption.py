"""When pages run out: who yields, who waits, and that nothing computed is lost needlessly."""

from fakes import Harness, greedy, last_plan, logged, prompt

from engine.request import Status


def test_preemption_takes_the_last_in_order_and_keeps_its_place():
    harness = logged(num_blocks=9, block_size=4, prefix_caching=False)
    for number in range(3):
        harness.add(f"r{number}", prompt(9, 100 * number), greedy(20))
    harness.step()
    assert len(last_plan(harness).new_rows) == 2  # the third lacks its page for generation
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
