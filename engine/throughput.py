"""How fast the engine gets through its queue."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Throughput:
    """What Retry-After is computed from: sequences finished within the last minute, else how long one takes already."""

    clock: Callable[[], float] = time.monotonic
    marks: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def finished(self) -> None:
        self.marks.append(self.clock())

    def seconds_for(self, sequences: int, running: int, age: float) -> float:
        """Time to finish so many at the measured rate, between 1 and 120 s (clients ignore more). Where none has been
        finished, the `running` ones take at least as long again as the oldest has taken, `age` seconds."""
        now = self.clock()
        while self.marks and now - self.marks[0] > 60.0:  # what was before a quiet time tells nothing
            self.marks.popleft()
        if len(self.marks) < 2:
            seconds = age * max(sequences / max(running, 1), 1.0)
        else:
            seconds = sequences * max(now - self.marks[0], 1e-3) / len(self.marks)
        return min(max(seconds, 1.0), 120.0)
