"""Slots: the executor's rows, handed out to running requests."""


class SlotPool:
    """A slot goes back when no unfinished step has a row in it, so an executor never clears a row it still needs."""

    def __init__(self, count: int) -> None:
        self.num_free = count
        self._count = count
        self._free = list(range(count))[::-1]
        self._untold: list[int] = []
        """Given back, and no plan has said so yet."""
        self._leaving: list[tuple[int, int]] = []
        """(last step with a row of it, slot)"""

    def take(self) -> int:
        self.num_free -= 1
        return self._free.pop()

    def give_back(self, slot: int, last_step: int, finished_step: int) -> None:
        """`last_step`: the last one planned with a row of it; all up to `finished_step` are done."""
        self._leaving.append((last_step, slot))
        if last_step <= finished_step:
            self.settle(finished_step)

    def settle(self, finished_step: int) -> None:
        """Call when a step is done."""
        if self._leaving:
            done = [slot for last_step, slot in self._leaving if last_step <= finished_step]
            self._leaving = [entry for entry in self._leaving if entry[0] > finished_step]
            self._free += done
            self._untold += done
            self.num_free += len(done)

    def newly_freed(self) -> list[int]:
        """For the next plan; each slot once."""
        untold, self._untold = self._untold, []
        return untold

    def check(self, in_use: list[int]) -> None:
        """Asserts that each slot is in exactly one place."""
        assert self.num_free == len(self._free)
        slots = in_use + [slot for _, slot in self._leaving] + self._free
        assert sorted(slots) == list(range(self._count)), slots
