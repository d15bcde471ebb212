"""A timeout for many short waits in turn, as a stream has them: two for each token.

`asyncio.timeout` sets a timer for each wait and takes it back. This one sets a timer now and then: when it rings, it
looks when the wait that is under way began, and sets itself anew.
"""

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """`with patience:` around each wait of one task, the task that made it; `close` at the end."""

    def __init__(self, seconds: float | None) -> None:
        """None: without end."""
        task = asyncio.current_task()
        assert task is not None
        self._seconds, self._task, self._loop = seconds, task, asyncio.get_running_loop()
        self._deadline: float | None = None
        """Of the wait that is under way."""
        self._timer: asyncio.TimerHandle | None = None
        self._has_rung = False

    def __enter__(self) -> Self:
        if self._seconds is not None:
            self._deadline = self._loop.time() + self._seconds
            if self._timer is None:
                self._timer = self._loop.call_at(self._deadline, self._ring)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raises TimeoutError in place of the cancellation that the timer asked for, and of no other."""
        self._deadline = None
        if self._has_rung:
            self._has_rung = False
            if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._ring)
        else:
            self._has_rung = True
            self._task.cancel()
