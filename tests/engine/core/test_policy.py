import random

import pytest
from fakes import Harness, greedy, make_request, prompt

from engine.core.policy import MAX_LEVEL, ChoiceGroups, OrderedQueue, order_key
from engine.core.slots import SlotPool
from engine.messages import AddRequest


def test_the_queue_is_ordered_by_priority_then_arrival():
    queue, requests = OrderedQueue(), []
    for sequence in range(200):
        requests.append(make_request([1], f"r{sequence}", sequence, priority=random.Random(sequence).randrange(-2, 3)))
    for request in requests:
        queue.add(request)
    assert list(queue) == sorted(requests, key=lambda request: request.order)
    assert queue.victim is list(queue)[-1]
    random.Random(1).shuffle(requests)
    for gone, request in enumerate(requests[:150]):
        queue.remove(request)
        assert len(queue) == 199 - gone and request not in list(queue)


def test_one_who_comes_back_gets_its_old_place():
    queue = OrderedQueue()
    first, second, third = (make_request([1], f"r{number}", number) for number in range(3))
    for request in (third, second, first):
        queue.add(request)
    assert list(queue) == [first, second, third]


def test_choices_wait_for_their_leaders_prompt():
    groups = ChoiceGroups()
    leader, second, third, other = (make_request([1], f"r{n}", n, group="g" if n < 3 else None) for n in range(4))
    assert [groups.join(request) for request in (leader, second, third, other)] == [True, False, False, True]
    assert groups.prompt_computed(second) == groups.prompt_computed(other) == []
    assert groups.prompt_computed(leader) == [second, third]
    assert groups.prompt_computed(leader) == []
    assert groups.heir(leader) is None


def test_the_next_choice_leads_when_the_leader_goes():
    groups = ChoiceGroups()
    leader, second, third = (make_request([1], f"r{n}", n, group="g") for n in range(3))
    for request in (leader, second, third):
        groups.join(request)
    assert not groups.drop(leader)
    assert groups.heir(leader) is second
    assert groups.drop(third) and not groups.drop(third)
    assert groups.prompt_computed(second) == []
    assert groups.join(make_request([1], "late", 9, group="g"))


def test_slots_go_back_when_their_last_step_is_done():
    slots = SlotPool(2)
    one, two = slots.take(), slots.take()
    assert (one, two, slots.num_free) == (0, 1, 0)
    slots.give_back(one, last_step=3, finished_step=3)
    slots.give_back(two, last_step=5, finished_step=3)
    slots.check([])
    assert slots.num_free == 1 and slots.newly_freed() == [0] and slots.newly_freed() == []
    slots.settle(4)
    assert slots.num_free == 1
    slots.settle(5)
    assert slots.num_free == 2 and slots.newly_freed() == [1]
    with pytest.raises(AssertionError):
        slots.check([0])


def asked(priority: int, arrival: float) -> AddRequest:
    return AddRequest(request_id="r", prompt_token_ids=[1], params=greedy(1), arrival=arrival, priority=priority)


def test_fcfs_looks_at_arrival_alone():
    keys = [order_key("fcfs", asked(priority, 100.0 - number), number) for number, priority in enumerate((5, -5, 0))]
    assert keys == sorted(keys)


def test_priorities_age():
    waiting = order_key("priority", asked(0, 100.0), 1)
    assert order_key("priority", asked(-1, 109.0), 2) < waiting < order_key("priority", asked(-1, 111.0), 3)
    assert order_key("priority", asked(1, 89.0), 4) < waiting < order_key("priority", asked(1, 95.0), 5)
    assert order_key("priority", asked(-(2**31), 0.0), 6)[0] == order_key("priority", asked(-MAX_LEVEL, 0.0), 7)[0]


@pytest.mark.parametrize(("policy", "served"), [("priority", 60), ("fcfs", 2)])
def test_nobody_starves_behind_urgent_requests(policy: str, served: int):
    """One place, and an urgent request every second."""
    harness = Harness(max_num_seqs=1, policy=policy)
    harness.add("first", prompt(3), greedy(1), priority=-5)
    patient = harness.add("patient", prompt(4, 500), greedy(1))
    for second in range(100):
        harness.add(f"urgent{second}", prompt(4, 10 * second), greedy(1), priority=-5)
        harness.step()
        harness.now += 1.0
    assert served - 11 <= patient.steps[0] <= served
    harness.run()
    harness.assert_idle()
