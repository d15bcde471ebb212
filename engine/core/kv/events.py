"""What happened to pages and why: a bounded, lossy ring for explanation. Counters live in `Stats`, not here.

    kind        reason and what it means                                 numbers
    hit         whole_prompt | diverged | end_of_cache | evicted |
                window_evicted: known further, but a layer with a window
                no longer has what the next row sees                     tokens, prompt_tokens, blocks, position
                ahead: others computed it while this prompt was computed tokens, blocks, position
    miss        nothing_cached | other_salt | evicted | diverged |
                window_evicted | caching_is_off                          tokens, prompt_tokens, blocks, position
    allocation  prompt | generation | recomputation | refresh            blocks
    eviction    allocation | duplicate                                   blocks, tokens, idle_steps
                reset: somebody asked for an empty cache                 blocks
                window: from a windowed group's pool alone               blocks, window
    copy        partial_hit                                              source, destination, tokens
    preemption  yielded_to_earlier | no_pages_left: needed one itself    pages: held by the victim
    refresh     interval: so many more tokens have been generated        pages: given back, tokens: to compute anew
    wait        no_pages | reserved: and nobody may overtake | no_slot |
                budget | unfinished_step | first_choice | deadline |
                refresh: another sequence is being refreshed

`position` is the first prompt token that the cache did not have, `position // block_size` its block.
"""

from collections import OrderedDict, deque
from itertools import islice
from typing import NamedTuple

from engine.core.kv.block import Block, Root, RootKey
from engine.request import Request

CAPACITY = 2048
GHOSTS = 4096
"""Evicted blocks remembered, to tell 'evicted' from 'never seen'."""

Report = dict[str, str | int | float | None]


class Event(NamedTuple):
    step: int
    kind: str
    reason: str
    request_id: str | None
    tenant: str | None
    other_id: str | None
    """A preemption's beneficiary."""
    other_tenant: str | None
    numbers: dict[str, int]


class EventLog:
    """The last `capacity` events, oldest first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.step = 0
        self.num_recorded = 0
        self._events: deque[Event] = deque(maxlen=capacity)

    def record(
        self, kind: str, reason: str, request: Request | None, other: Request | None = None, **numbers: int
    ) -> None:
        """`request`: whom it befell, None: the cache as a whole; `other`: for whose sake."""
        self.num_recorded += 1
        own_id, own_tenant = (None, None) if request is None else (request.request_id, request.tenant)
        other_id, other_tenant = (None, None) if other is None else (other.request_id, other.tenant)
        self._events.append(Event(self.step, kind, reason, own_id, own_tenant, other_id, other_tenant, numbers))

    def report(self, limit: int, tenant: str | None = None) -> list[Report]:
        """The newest `limit` events, newest last.

        With a tenant: its own alone, other tenants' request ids struck out, and nothing that tells whether another
        salt holds some text.
        """
        chosen = (
            event for event in reversed(self._events) if tenant is None or tenant in (event.tenant, event.other_tenant)
        )
        return [_as_report(event, tenant) for event in islice(chosen, limit)][::-1]


def _as_report(event: Event, tenant: str | None) -> Report:
    see_request = tenant is None or event.tenant == tenant
    see_other = tenant is None or event.other_tenant == tenant
    report: Report = {
        "step": event.step,
        "kind": event.kind,
        "reason": "nothing_cached" if tenant is not None and event.reason == "other_salt" else event.reason,
        "request_id": event.request_id if see_request else None,
    }
    if event.other_id is not None:
        report["for_request_id"] = event.other_id if see_other else None
    if tenant is None and event.tenant is not None:
        report["tenant"] = event.tenant
    return report | event.numbers


class EvictionMemory:
    """Names of the full blocks evicted last, each under its parent. Explains misses; decides nothing."""

    def __init__(self, capacity: int = GHOSTS) -> None:
        self._capacity = capacity
        self._names: OrderedDict[tuple[RootKey | int, int, tuple[int, ...]], None] = OrderedDict()

    def remember(self, block: Block) -> None:
        """Call before `block` leaves the tree."""
        assert block.parent is not None
        self._names[_name(block.parent, block.tokens)] = None
        if len(self._names) > self._capacity:
            self._names.popitem(last=False)

    def holds(self, parent: Block, tokens: tuple[int, ...]) -> bool:
        return _name(parent, tokens) in self._names


def _name(parent: Block, tokens: tuple[int, ...]) -> tuple[RootKey | int, int, tuple[int, ...]]:
    if isinstance(parent, Root):
        return parent.key, 0, tokens
    return parent.id, parent.stamp, tokens
