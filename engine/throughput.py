"""How fast the engine gets through its queue."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Throughput:
    """Sequences finished within the last minute: what Retry-After is computed from."""

    clock: Callable[[], float] = time.monotonic
    marks: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def finished(self) -> None:
        self.marks.append(self.clock())

    def seconds_for(self, sequences: int) -> float:
        """Time to finish so many at the measured rate, between 1 and 120 s (clients ignore more)."""
        now = self.clock()
        while self.marks and now - self.marks[0] > 60.0:  # what was before a quiet time tells nothing
            self.marks.popleft()
        if len(self.marks) < 2:
            return 1.0
        rate = len(self.marks) / max(now - self.marks[0], 1e-3)
        return min(max(sequences / rate, 1.0), 120.0)
