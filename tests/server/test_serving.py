"""Listening, waiting for a thread, and what the terminal shows. The command as a whole: test_process.py."""

import asyncio
import io
import socket
import threading

import pytest

from configs.settings import Settings
from engine.errors import StartupError
from engine.messages import CacheInfo, EngineReady
from server.banner import Progress, startup_block
from server.serving import _in_thread, bind


# ---------------------------------------------------------------------- listening
def test_a_port_in_use_is_one_sentence_that_names_the_flag():
    with bind(Settings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=rf"^cannot listen on 127\.0\.0\.1 port {port}: address already in use.*--port"
        ):
            bind(Settings(port=port))


def test_an_address_that_is_not_ours():
    with pytest.raises(StartupError, match="--port"):
        bind(Settings(host="192.0.2.1", port=0))
    with pytest.raises(StartupError, match="--host"):
        bind(Settings(host="no-such-host.invalid", port=0))


def test_closed_to_the_network_unless_a_key_guards_it():
    for settings, host in ((Settings(port=0), "127.0.0.1"), (Settings(port=0, api_key=("k",)), "0.0.0.0")):
        with bind(settings) as listener:
            assert listener.getsockname()[0] == host


def test_ipv6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with bind(Settings(host="::1", port=0)) as listener:
            assert listener.family == socket.AF_INET6
    except StartupError as error:
        pytest.skip(str(error))


# ---------------------------------------------------------------------- threads
def test_a_threads_result_and_error():
    assert asyncio.run(_in_thread(lambda: threading.current_thread().daemon)) is True
    with pytest.raises(ZeroDivisionError):
        asyncio.run(_in_thread(lambda: 1 // 0))


def test_a_thread_that_nobody_waits_for_holds_nothing_up():
    goes_on = threading.Event()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await _in_thread(lambda: goes_on.wait(20))

    asyncio.run(leave())
    goes_on.set()


# ---------------------------------------------------------------------- the terminal
READY = EngineReady(CacheInfo(64, 16, 4096, 256, "bf16", 512, True), {"model": "tiny", "KV pool": "64 pages"}, 259)


def test_the_start_up_block_has_a_command_to_paste():
    block = startup_block("tiny", READY, Settings(), "0.0.0.0", 8123)
    assert "Octavo serves tiny" in block and "64 pages" in block
    assert "http://127.0.0.1:8123" in block and "curl http://127.0.0.1:8123/v1/chat/completions" in block
    assert "Authorization" not in block


def test_the_start_up_block_shows_that_a_key_is_needed_but_not_the_key():
    block = startup_block("tiny", READY, Settings(api_key=("secret",)), "::1", 8000)
    assert "Authorization: Bearer KEY" in block and "secret" not in block and "http://[::1]:8000" in block


def test_progress_is_a_line_a_phase_where_there_is_no_terminal():
    out = io.StringIO()
    progress = Progress(out)
    for phase, done in (("downloading", 0.0), ("downloading", 0.5), ("loading weights", 0.1), ("loading weights", 1.0)):
        progress.report(phase, done)
    progress.close()
    assert out.getvalue() == "downloading\nloading weights\n"


def test_progress_is_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    progress = Progress(out)
    for done in (0.0, 0.5, 1.0, 1.5):
        progress.report("loading weights", done)
    progress.close()
    progress.close()
    assert "loading weights" in out.getvalue() and "100%" in out.getvalue()
