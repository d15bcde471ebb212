from fakes import Harness, make_request, prompt

from engine.core.kv.events import EventLog
from engine.sampling_params import SamplingParams

ONE = SamplingParams(temperature=0.0, max_tokens=1)


def lookups(harness: Harness, tenant: str | None = None) -> list[tuple]:
    events = harness.core.events(1000, tenant)
    return [(e["kind"], e["reason"], e["position"]) for e in events if e["kind"] in ("hit", "miss")]


def test_the_ring_forgets_the_oldest():
    log = EventLog(capacity=3)
    for number in range(5):
        log.record("allocation", "prompt", make_request([1], f"r{number}"), blocks=number)
    assert [event["blocks"] for event in log.report(10)] == [2, 3, 4]
    assert [event["blocks"] for event in log.report(2)] == [3, 4]
    assert log.num_recorded == 5


def test_why_a_prompt_missed():
    harness = Harness(num_blocks=8, block_size=4)
    harness.complete(prompt(10), ONE)
    harness.complete(prompt(10), ONE)
    harness.complete([*prompt(6), 1, 2, 3, 4], ONE)
    harness.complete([*prompt(10), 1, 2, 3, 4, 5, 6], ONE)
    harness.complete(prompt(10), ONE, salt="other")
    harness.complete(prompt(30, 500), ONE)
    harness.complete(prompt(10), ONE)
    harness.complete([7, *prompt(9)], ONE, salt="third")
    assert lookups(harness) == [
        ("miss", "nothing_cached", 0),
        ("hit", "whole_prompt", 9),
        ("hit", "diverged", 6),
        ("hit", "diverged", 10),
        ("miss", "other_salt", 0),
        ("miss", "diverged", 0),
        ("miss", "evicted", 0),
        ("miss", "nothing_cached", 0),
    ]


def test_where_the_cache_ends():
    harness = Harness()
    harness.complete(prompt(8), ONE)
    harness.complete(prompt(20), ONE)
    assert lookups(harness)[-1] == ("hit", "end_of_cache", 8)


def test_a_part_was_evicted():
    harness = Harness(num_blocks=8, block_size=4)
    harness.complete(prompt(16), ONE)
    harness.complete(prompt(24, 500), ONE)  # takes the last two blocks of the first
    harness.complete(prompt(16), ONE)
    assert lookups(harness)[-1] == ("hit", "evicted", 8)


def test_without_caching_that_is_the_reason():
    harness = Harness(prefix_caching=False)
    harness.complete(prompt(8), ONE)
    assert lookups(harness) == [("miss", "caching_is_off", 0)]


def test_allocation_copy_and_eviction_say_how_much_and_for_whom():
    harness = Harness(num_blocks=8, block_size=4)
    harness.complete(prompt(10), ONE)
    harness.complete(prompt(10), ONE)
    harness.complete(prompt(31, 500), ONE)
    events = harness.core.events(100)
    assert [(e["reason"], e["request_id"], e["blocks"]) for e in events if e["kind"] == "allocation"] == [
        ("prompt", "r0", 3),
        ("prompt", "r1", 1),
        ("prompt", "r2", 8),
    ]
    (copied,) = [e for e in events if e["kind"] == "copy"]
    assert (copied["request_id"], copied["tokens"]) == ("r1", 1)
    (evicted,) = [e for e in events if e["kind"] == "eviction" and e["reason"] == "allocation"]
    assert (evicted["request_id"], evicted["blocks"], evicted["tokens"]) == ("r2", 3, 10)


def preempting() -> Harness:
    harness = Harness(num_blocks=8, block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    harness.add("mine", prompt(9), params, tenant="me", salt="me")
    harness.add("yours", prompt(9, 500), params, tenant="you", salt="you")
    harness.run()
    return harness


def test_a_preemption_names_victim_and_beneficiary():
    events = [e for e in preempting().core.events(1000) if e["kind"] == "preemption"]
    assert [(e["reason"], e["request_id"], e["for_request_id"], e["tenant"]) for e in events] == [
        ("yielded_to_earlier", "yours", "mine", "you")
    ]
    assert events[0]["pages"] == 4


def test_a_waiting_request_says_why_once():
    waits = [e for e in preempting().core.events(1000) if e["kind"] == "wait"]
    assert [(e["request_id"], e["reason"]) for e in waits] == [("yours", "reserved")]


def test_a_tenant_sees_its_own_alone():
    core = preempting().core
    for tenant, own, other in (("me", "mine", "yours"), ("you", "yours", "mine")):
        events = core.events(1000, tenant)
        assert events and all("tenant" not in event for event in events)
        assert {e["request_id"] for e in events} <= {own, None}
        assert all(other not in event.values() for event in events)
        (preemption,) = [e for e in events if e["kind"] == "preemption"]
        assert own in (preemption["request_id"], preemption["for_request_id"])
    assert core.events(1000, "nobody") == []


def test_a27_a_tenants_report_does_not_tell_what_another_salt_holds():
    harness = Harness()
    harness.complete(prompt(10), ONE, tenant="me", salt="me")
    harness.complete(prompt(10), ONE, tenant="you", salt="you")
    assert lookups(harness)[-1] == ("miss", "other_salt", 0)
    assert lookups(harness, "you") == [("miss", "nothing_cached", 0)]
