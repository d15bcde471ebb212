"""Requests that hold no slot: queued in order, or held behind the first choice of their prompt.

arrive ──> queued <── put_back (preempted)        queued ──> take (admitted)
   └─────> held ────> queued (prompt_computed)    both ────> remove (ended)
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from weakref import WeakValueDictionary

from engine.core.policy import ChoiceGroups, OrderedQueue
from engine.request import Batch, Request, Status


class WaitingRoom:
    """All requests whose status is WAITING."""

    def __init__(self, shares_prompts: bool) -> None:
        """`shares_prompts`: of n choices one computes the prompt, and the others find it in the cache."""
        self.queue = OrderedQueue()
        self.num_tokens = 0
        """Of all that wait: prompts, and what preempted ones have generated."""
        self._shares_prompts = shares_prompts
        self._groups = ChoiceGroups()
        self._num_arrived = 0
        self._batches: WeakValueDictionary[str, Batch] = WeakValueDictionary()
        self._deadlines: list[tuple[float, int, str]] = []
        """(deadline, arrival number, request id), the next one first. Ids: what has long finished is not kept alive."""

    def arrive(self, request: Request) -> bool:
        """False: it is held."""
        self.num_tokens += len(request.token_ids)
        self._num_arrived += 1
        if request.batch_id is not None:
            request.batch = self._batches.setdefault(request.batch_id, Batch())
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, self._num_arrived, request.request_id))
        if self._shares_prompts and not self._groups.join(request):
            return False
        self.queue.add(request)
        return True

    def put_back(self, request: Request) -> None:
        self.num_tokens += len(request.token_ids)
        self.queue.add(request)

    def take(self, request: Request) -> None:
        self.num_tokens -= len(request.token_ids)
        self.queue.remove(request)
        if request.batch is not None:
            request.batch.is_served = True

    def remove(self, request: Request) -> None:
        self.num_tokens -= len(request.token_ids)
        if not self._groups.drop(request):
            self.queue.remove(request)

    def prompt_computed(self, leader: Request) -> None:
        """Queues the other choices."""
        for sibling in self._groups.prompt_computed(leader):
            self.queue.add(sibling)

    def succeed(self, ended: Request) -> None:
        """Call when any request has ended: if it led choices that are still held, the next one leads."""
        heir = self._groups.heir(ended)
        if heir is not None:
            self.queue.add(heir)

    def expired(self, requests: dict[str, Request], now: float) -> Iterator[Request]:
        """Those of `requests` that have waited past their deadline, neither they nor one of their batch ever scheduled:
        an answer that is being made has no deadline any more.

        Whoever is held waits for a request that is served already, or expires before it.
        """
        while self._deadlines and self._deadlines[0][0] < now:
            request = requests.get(heappop(self._deadlines)[2])
            if request is None or request.timings.first_scheduled:
                continue
            if request.batch is not None and request.batch.is_served:
                continue
            if not self._groups.holds(request):
                yield request

    def check(self, requests: list[Request]) -> None:
        """`requests`: all that wait. Asserts that they are counted, and that those that are queued hold nothing."""
        self.queue.check()
        assert self.num_tokens == sum(len(request.token_ids) for request in requests)
        for request in self.queue:
            assert request.status is Status.WAITING and not request.block_ids and request.slot < 0, request.request_id
