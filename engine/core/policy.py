"""Who goes first: the order of requests, and what follows from it."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from configs.limits import Policy
from engine.messages import AddRequest
from engine.request import Request

_order = attrgetter("order")

LEVEL_SECONDS = 10.0
"""What a level of priority is worth: a request goes before those one level lower that came up to so much earlier."""
MAX_LEVEL = 100
"""Priorities count from -100 to 100; so nobody waits longer than 2,000 s for later ones, however urgent."""

MAX_EXAMINED = 8
"""Waiting requests looked at in a step."""


def order_key(policy: Policy, request: AddRequest, number: int) -> tuple[float, int]:
    """Who goes first: the smaller. Kept for life, so that ageing needs no clock: a request of priority p stands where
    one of priority 0 would that came p x 10 s later. `number` counts arrivals."""
    if policy == "fcfs":
        return 0.0, number
    return request.arrival + LEVEL_SECONDS * min(max(request.priority, -MAX_LEVEL), MAX_LEVEL), number


class OrderedQueue:
    """Requests by order key, first to go first. Mostly appended to: O(log n) and a short move."""

    def __init__(self) -> None:
        self.items: list[Request] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.items)

    def add(self, request: Request) -> None:
        if self.items and request.order < self.items[-1].order:
            insort(self.items, request, key=_order)
        else:
            self.items.append(request)

    def remove(self, request: Request) -> None:
        place = bisect_left(self.items, request.order, key=_order)
        assert self.items[place] is request, request.request_id
        del self.items[place]

    @property
    def victim(self) -> Request:
        """Who is preempted when pages run out: the last in order, so that nobody yields to a later one."""
        return self.items[-1]

    def check(self) -> None:
        """Asserts the order."""
        assert all(one.order < two.order for one, two in pairwise(self.items))


class ChoiceGroups:
    """The n choices of one prompt: one leads, the others wait until its prompt is computed, then find it in the cache.

    If the leader goes before that, the next one leads.
    """

    def __init__(self) -> None:
        self._leaders: dict[str, Request] = {}
        self._held: dict[str, list[Request]] = {}

    def join(self, request: Request) -> bool:
        """Whether the request may queue now; if not it is held until a call below returns it."""
        if request.group is None:
            return True
        if request.group in self._leaders:
            self._held[request.group].append(request)
            return False
        self._leaders[request.group], self._held[request.group] = request, []
        return True

    def prompt_computed(self, request: Request) -> list[Request]:
        """Those that waited for this request's prompt."""
        if request.group is None or self._leaders.get(request.group) is not request:
            return []
        del self._leaders[request.group]
        return self._held.pop(request.group)

    def holds(self, request: Request) -> bool:
        return request.group is not None and request in self._held.get(request.group, ())

    def drop(self, request: Request) -> bool:
        """Forgets a held request. False if it is not held."""
        if not self.holds(request):
            return False
        assert request.group is not None
        self._held[request.group].remove(request)
        return True

    def heir(self, request: Request) -> Request | None:
        """Call when a request ends: who leads in its place, if it led and anybody is held."""
        held = self.prompt_computed(request)
        if not held:
            return None
        assert request.group is not None
        self._leaders[request.group], self._held[request.group] = held[0], held[1:]
        return held[0]
