"""Every test here has an end of its own: a hang is a failure."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

SECONDS = 180.0


@pytest.fixture(autouse=True)
def hard_timeout() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took longer than {SECONDS:g} s")

    earlier = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, earlier)
