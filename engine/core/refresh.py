"""Refreshes: keys and values of a running sequence computed anew, in full precision, again and again.

What a quantised cache holds of a generated token was made from what attention read of a quantised cache, so errors grow
with the generated length. One rule bounds them, for an interval of N tokens:

    A sequence that has generated k x N >= N tokens computes its first (prompt + k x N - 1) tokens in full precision,
    into pages of its own, and the others as usual.

    token_ids   |■■■■■■■ prompt ■■■■■■■|■■■■■■■■■■■■■ k x N generated ■■■■■■■■■■■■■|■■ fewer than N more ■■
    computed    |────────────────────── in full precision ──────────────────────|──── as usual ────>

So nothing that was computed before the last refresh matters, and a sequence that was preempted comes back to the same
bits by the same rule. Those pages are no function of the tokens alone: they are not looked up and never published.
Pages that the sequence shared, or had published, stay as they are for others.

A sequence that is due gives its table back and queues with its key, like one that was preempted. While its first tokens
are computed the executor keeps them in full precision as well, in a scratch that has room for one sequence: whoever
comes next waits, and nobody behind it is admitted before it.
"""

from collections.abc import Iterable

from engine.request import Request, Status


class Refreshes:
    """Who is due, and whose turn it is."""

    def __init__(self, interval: int | None) -> None:
        """`interval`: generated tokens between two refreshes of a sequence; None: there are none."""
        self._interval = interval
        self.current: Request | None = None
        """Has the scratch: some of its first tokens have been planned in full precision, but not all."""

    def due(self, requests: list[Request]) -> list[Request]:
        """Those of a finished step that have just generated a multiple of the interval, and go on."""
        if self._interval is None:
            return []
        return [
            request
            for request in requests
            if len(request.token_ids) == request.halts_at < request.max_total and request.status is not Status.FINISHED
        ]

    def begin(self, request: Request) -> None:
        """All that it has computed, its last token excepted, is to be computed anew. It holds no table."""
        assert self._interval is not None and not request.block_ids, request.request_id
        request.num_refreshed = len(request.token_ids) - 1
        request.halts_at = min(request.max_total, request.halts_at + self._interval)
        request.num_reached = 0

    def must_wait(self, request: Request) -> bool:
        """Another has the scratch that the request would need."""
        return request.num_refreshed > 0 and self.current is not None

    def plan(self, request: Request, end: int) -> None:
        """A step computes its tokens up to `end`, all of them in full precision."""
        assert self.current in (None, request) and end <= request.num_refreshed, request.request_id
        self.current = request if end < request.num_refreshed else None

    def leave(self, request: Request) -> None:
        """It has ended, or given its table back."""
        if self.current is request:
            self.current = None

    def check(self, running: Iterable[Request]) -> None:
        """Asserts that whoever is amid its first tokens, and nobody else, has the scratch."""
        amid = [request for request in running if request.num_computed < request.num_refreshed]
        assert amid == ([] if self.current is None else [self.current]), [request.request_id for request in amid]
