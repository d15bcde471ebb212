"""Work in threads: so many at once, dropped where nobody waits for it any more, and in nobody's way at the end."""

import asyncio
import threading

import pytest
from kit import eventually

from server.aside import Aside, Lane
from server.limits import HTTPLimits


def test_a_result_an_error_and_no_thread_left():
    lane = Lane("a-lane", 1)
    assert asyncio.run(lane.run(lambda: threading.current_thread().daemon)) is True
    with pytest.raises(ZeroDivisionError):
        asyncio.run(lane.run(lambda: 1 // 0))
    eventually(lambda: not lane.is_busy and all(thread.name != "a-lane" for thread in threading.enumerate()))


def test_what_is_stuck_holds_up_no_loops_end():
    goes_on, lane = threading.Event(), Lane("stuck", 1)

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await lane.run(lambda: goes_on.wait(20))

    asyncio.run(leave())
    assert lane.is_busy
    goes_on.set()
    eventually(lambda: not lane.is_busy)


def test_a_lane_is_no_wider_for_those_who_have_left():
    """Whoever goes frees no place before the work has ended; what nobody waits for is never begun."""
    goes_on, lane = threading.Event(), Lane("narrow", 2)
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        goes_on.wait(20)
        return number

    async def main() -> list[int | BaseException]:
        tasks = [asyncio.create_task(lane.run(lambda number=number: work(number))) for number in range(6)]
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        for gone in (0, 1, 2, 4):
            tasks[gone].cancel()
        await asyncio.wait([tasks[gone] for gone in (0, 1, 2, 4)])
        assert begun == [0, 1]
        goes_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert [result for result in results if isinstance(result, int)] == [3, 5]
    assert sorted(begun) == [0, 1, 3, 5]


def test_the_largest_wait_for_one_another_and_the_others_do_not():
    aside = Aside(HTTPLimits(inline_size=10, light_size=100, light_width=1, heavy_width=1))
    goes_on = threading.Event()

    async def main() -> None:
        heavy = [asyncio.create_task(aside.run(101, lambda: goes_on.wait(20))) for _ in range(2)]
        assert await aside.run(100, threading.current_thread) is not threading.current_thread()
        assert await aside.run(10, threading.current_thread) is threading.current_thread()
        assert not any(task.done() for task in heavy)
        goes_on.set()
        assert await asyncio.gather(*heavy) == [True, True]

    asyncio.run(main())
