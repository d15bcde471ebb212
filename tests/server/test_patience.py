"""Many short waits of one task under one timer, in time that passes when nothing else happens."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from server.patience import Patience


class Clockwork(asyncio.SelectorEventLoop):
    """Its clock stands still while anybody works, then jumps to the next timer."""

    now = 0.0
    timers = 0

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, *arguments: Any, **others: Any) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(when, *arguments, **others)

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run(test: Coroutine[Any, Any, None]) -> Clockwork:
    loop = Clockwork()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(test)
    return loop


def test_a_wait_that_is_too_long_ends_and_the_next_one_has_its_whole_time() -> None:
    async def test() -> None:
        patience = Patience(10.0)
        for began in (0.0, 16.0):
            with patience:
                await asyncio.sleep(6.0)
            with pytest.raises(TimeoutError), patience:
                await asyncio.sleep(100.0)
            assert asyncio.get_running_loop().time() == began + 16.0
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        patience.close()

    run(test())


def test_waits_that_are_short_enough_go_on_for_ever_and_cost_no_timer() -> None:
    async def test() -> None:
        patience = Patience(10.0)
        for _ in range(1000):
            with patience:
                await asyncio.sleep(0)
        for _ in range(100):
            with patience:
                await asyncio.sleep(9.0)
        patience.close()

    loop = run(test())
    assert loop.now == 900.0
    assert loop.timers - 100 <= 101, "beside those of the sleeps, one for each time that it rings"


def test_time_between_waits_does_not_count() -> None:
    async def test() -> None:
        patience = Patience(10.0)
        for _ in range(3):
            with patience:
                await asyncio.sleep(0)
            await asyncio.sleep(50.0)
        patience.close()

    run(test())


def test_without_end() -> None:
    async def test() -> None:
        patience = Patience(None)
        with patience:
            await asyncio.sleep(1e6)
        patience.close()

    assert run(test()).timers == 1


@pytest.mark.parametrize("after", [5.0, 10.0], ids=["before it rings", "when it rings"])
def test_a_cancellation_by_others_stays_one(after: float) -> None:
    async def wait() -> None:
        with Patience(10.0):
            await asyncio.sleep(100.0)

    async def test() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(after, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test())


def test_what_fails_by_itself_fails_so() -> None:
    async def test() -> None:
        with pytest.raises(KeyError), Patience(10.0):
            raise KeyError

    run(test())


def test_nothing_rings_after_the_end() -> None:
    async def test() -> None:
        patience = Patience(10.0)
        with patience:
            await asyncio.sleep(0)
        patience.close()
        loop = asyncio.get_running_loop()
        assert all(timer.cancelled() for timer in loop._scheduled)  # type: ignore[attr-defined]

    run(test())
