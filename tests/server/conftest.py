"""Every test here has an end of its own: a hang is a failure."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from kit import ScriptedServer, receive_until

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


@pytest.fixture
def idle_afterwards(server: ScriptedServer) -> Iterator[None]:
    """For modules with a `server` of their own."""
    yield
    server.assert_idle()


@pytest.fixture
def bystander(server: ScriptedServer) -> Iterator[None]:
    """Another request, under way meanwhile, which must end well. The server has a script "long" without an end."""
    server.executor.hold()
    with server.open_request("long", max_tokens=20, stream=True) as connection:
        yield
        server.executor.allow(None)
        received = receive_until(connection, b"[DONE]")
    assert b'"finish_reason":"length"' in received and b"error" not in received
