"""What waits for the engine, as the API process knows it, so that a full queue is refused without a round trip."""

from collections import deque
from dataclasses import dataclass

from engine.errors import Overloaded
from engine.messages import Stats
from engine.throughput import Throughput


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait. None: no bound."""

    max_num_seqs: int
    """Sequences that run at once: these do not count as queued."""
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    queue_timeout: float | None = None
    """Seconds a sequence may wait for its first step."""
    watchdog_timeout: float | None = None
    """Seconds without a word from an engine that has work, after which it is taken for dead."""
    stall_timeout: float = 60.0
    """Seconds a reader may leave its text unread before its request is aborted."""


class WaitingLine:
    """The sequences that the engine has counted, by its latest `Stats`, and those on their way to it."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.throughput = Throughput()
        self.num_sent = 0
        """Sequences sent to the engine since it started."""
        self._on_their_way: deque[tuple[int, int]] = deque()
        """(number, prompt tokens)"""

    def sent(self, tokens: int) -> None:
        """A sequence with so many prompt tokens."""
        self.num_sent += 1
        self._on_their_way.append((self.num_sent, tokens))

    def counted(self, stats: Stats) -> None:
        while self._on_their_way and self._on_their_way[0][0] <= stats.received_total:
            self._on_their_way.popleft()

    def length(self, stats: Stats) -> int:
        """Sequences that wait; of those on their way the ones that find no free row."""
        return max(0, self._beyond_rows(stats))

    def is_full(self, stats: Stats) -> bool:
        limit = self.limits.max_num_queued_reqs
        return limit is not None and self.length(stats) >= max(limit, 1)

    def refusal(self, stats: Stats, sequences: int, tokens: int, age: float) -> Overloaded | None:
        """Of so many more, with so many prompt tokens in all; None where there is room. age: seconds since the oldest
        open sequence came."""
        queued = self._beyond_rows(stats) + sequences
        limit = self.limits.max_num_queued_reqs
        if limit is not None and queued > limit:
            text = f"{queued} sequences would wait; the limit is {limit}"
            return self._overloaded("max_num_queued_reqs", text, self._seconds_for(queued, stats, age))
        limit = self.limits.max_num_queued_tokens
        queued_tokens = stats.waiting_tokens + sum(t for _, t in self._on_their_way) + tokens
        if limit is not None and queued > 0 and queued_tokens > limit:
            text = f"{queued_tokens} prompt tokens would wait; the limit is {limit}"
            return self._overloaded("max_num_queued_tokens", text, self._seconds_for(queued, stats, age))
        return None

    def timed_out(self, stats: Stats, text: str, age: float) -> Overloaded:
        """Of a sequence that has waited too long. age: as above."""
        return Overloaded(text, self._seconds_for(max(self.length(stats), 1), stats, age), "queue_timeout")

    def _seconds_for(self, queued: int, stats: Stats, age: float) -> float:
        return self.throughput.seconds_for(queued, stats.running, age)

    def _beyond_rows(self, stats: Stats) -> int:
        free = max(0, self.limits.max_num_seqs - stats.running)
        return stats.waiting + len(self._on_their_way) - free

    @staticmethod
    def _overloaded(reason: str, text: str, seconds: float) -> Overloaded:
        flag = reason.replace("_", "-")
        return Overloaded(f"The queue is full: {text} (--{flag}).", seconds, reason)
