"""Work that would hold up the event loop, done in a bounded number of threads.

They are daemon threads, and none outlives its work: neither a client's cancellation nor the end of the process ever
waits for one of them, which the loop's own executor would.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from server.limits import HTTPLimits

Result = TypeVar("Result")


class Lane:
    """At most `width` pieces of work at once, also where those who asked for them have gone."""

    def __init__(self, name: str, width: int) -> None:
        self._name = name
        self._width = width
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._running = 0

    @property
    def is_busy(self) -> bool:
        return self._running > 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """`work`'s result or exception. What still waits when its caller is cancelled is never begun."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(done: Callable[[], None]) -> None:
            if not future.cancelled():
                done()

        def job() -> None:
            if future.cancelled():
                return
            try:
                done = partial(future.set_result, work())
            except BaseException as error:
                done = partial(future.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
                loop.call_soon_threadsafe(settle, done)

        with self._lock:
            self._queue.append(job)
            starts = self._running < self._width
            self._running += starts
        if starts:
            threading.Thread(target=self._work_off, name=self._name, daemon=True).start()
        return await future

    def _work_off(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running -= 1
                    return
                job = self._queue.popleft()
            job()


class Aside:
    """Where work goes by its size: the smallest is done at once, the largest waits in a lane of its own, so that it
    delays nobody else and its memory stays bounded."""

    def __init__(self, limits: HTTPLimits) -> None:
        self._limits = limits
        self._light = Lane("text", limits.light_width)
        self._heavy = Lane("long-text", limits.heavy_width)

    @property
    def is_busy(self) -> bool:
        return self._light.is_busy or self._heavy.is_busy

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """`size`: about so many characters, tokens or bytes go through it."""
        if size <= self._limits.inline_size:
            return work()
        return await (self._light if size <= self._limits.light_size else self._heavy).run(work)
