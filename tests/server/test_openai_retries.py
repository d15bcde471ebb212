"""What the official client does by itself when things go wrong: waits, tries again or gives up, as the server means."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2
import openai
import pytest
from kit import MODEL, ScriptedServer, endless, eventually

SCRIPTS = {"s1": b"AB", "long": endless, "ill": b"ABC"}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(SCRIPTS) as server:
        server.executor.fail_after = {"ill": 2}
        yield server


@contextmanager
def client_of(port: int, retries: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=retries) as client:
        yield client


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with client_of(server.port, 3) as client:
        yield client


@contextmanager
def full_server() -> Iterator[ScriptedServer]:
    """Its only place is taken, nobody may wait, and time stands still."""
    with ScriptedServer(SCRIPTS, max_num_seqs=1, max_num_queued_reqs=0, window=2000) as busy:
        busy.executor.hold()
        with busy.open_request("long"):
            busy.step_until(lambda: busy.context.client.stats.running == 1)
            yield busy


class Relay:
    """A proxy on the way to the server that can be cut off."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.pairs: list[tuple[socket.socket, socket.socket]] = []

    def __enter__(self) -> "Relay":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Every connection there is."""
        for pair in self.pairs:
            for end in pair:
                with end:
                    _shut(end)
        self.pairs = []

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(("127.0.0.1", self._server_port))
            self.pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    _shut(sink)


def _shut(end: socket.socket) -> None:
    with suppress(OSError):  # it may be so already
        end.shutdown(socket.SHUT_RDWR)


# ---------------------------------------------------------------------- worth another try
def test_overload_is_worth_another_try(caplog: pytest.LogCaptureFixture):
    """The client waits exactly as long as the server says and is then served."""
    caplog.set_level("INFO", "openai._base_client")
    with full_server() as busy, client_of(busy.port, 2) as client:
        with pytest.raises(openai.InternalServerError) as error:
            client.with_options(max_retries=0).completions.create(model=MODEL, prompt="s1")
        assert error.value.status_code == 503 and error.value.code == "overloaded"
        assert int(error.value.response.headers["retry-after"]) >= 1
        told: list[float] = []

        def note(response: httpx2.Response) -> None:
            if response.status_code == 503:
                told.append(int(response.headers["retry-after-ms"]) / 1000)
                busy.executor.allow(None)  # there will be room when it comes back

        with httpx2.Client(event_hooks={"response": [note]}) as http:
            retrying = client.with_options(http_client=http)
            assert retrying.completions.create(model=MODEL, prompt="s1").choices[0].text == "AB"
    waited = [record.args[0] for record in caplog.records if str(record.msg).startswith("Retrying request in")]
    assert waited == told and len(told) >= 1


def test_overload_is_worth_another_try_for_the_async_client():
    async def use(busy: ScriptedServer) -> str:
        async def make_room(response: httpx2.Response) -> None:
            if response.status_code == 503:
                busy.executor.allow(None)

        http = httpx2.AsyncClient(event_hooks={"response": [make_room]})
        base = f"http://127.0.0.1:{busy.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=2, http_client=http) as client:
            return (await client.completions.create(model=MODEL, prompt="s1")).choices[0].text

    with full_server() as busy:
        assert asyncio.run(use(busy)) == "AB"


@pytest.mark.parametrize("phase", ["loading", "draining"])
def test_a_server_that_is_not_ready_says_when_to_come_back(phase: str):
    loads = threading.Event()
    with ScriptedServer(SCRIPTS, loads=loads) as server, client_of(server.port, 0) as client:
        if phase == "draining":
            loads.set()
            eventually(lambda: server.context.phase == "ready")
            server.call(lambda: server.context.client.drain(0.0))
        with pytest.raises(openai.InternalServerError) as error:
            client.completions.create(model=MODEL, prompt="s1")
        assert (error.value.status_code, error.value.code) == (503, "engine_not_ready")
        assert int(error.value.response.headers["retry-after-ms"]) > 0
        assert "x-should-retry" not in error.value.response.headers


def test_a_lost_connection_is_tried_again_and_the_lost_work_ends(server: ScriptedServer):
    """The answer is asked for twice and computed to its end once."""
    finished = server.context.metrics.requests_finished
    aborted, stopped = finished["abort"], finished["stop"]
    server.executor.hold()
    texts: list[str] = []
    with Relay(server.port) as relay, client_of(relay.port, 2) as client:
        asking = threading.Thread(
            target=lambda: texts.append(client.completions.create(model=MODEL, prompt="s1").choices[0].text)
        )
        asking.start()
        eventually(lambda: server.context.client.num_open == 1)
        relay.cut()
        eventually(lambda: finished["abort"] == aborted + 1)
        server.executor.allow(None)
        asking.join()
    assert texts == ["AB"] and finished["stop"] == stopped + 1
    server.assert_idle()


# ---------------------------------------------------------------------- not worth it
def test_a_request_that_cannot_succeed_is_not_repeated(client: openai.OpenAI, server: ScriptedServer):
    before = server.context.metrics.requests_finished["error"]
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL, prompt="ill")
    assert server.context.metrics.requests_finished["error"] == before + 1


def test_a_bad_request_is_not_repeated(client: openai.OpenAI, server: ScriptedServer):
    before = server.context.metrics.requests_finished["rejected"]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="s1", n=1000)
    assert server.context.metrics.requests_finished["rejected"] == before + 1


def test_a_client_that_waits_no_longer_ends_its_work(client: openai.OpenAI, server: ScriptedServer):
    before = server.context.metrics.requests_finished["abort"]
    server.executor.hold()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3, max_retries=0).completions.create(model=MODEL, prompt="long", max_tokens=400)
    eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)
    server.assert_idle()
    assert server.context.metrics.requests_finished["abort"] == before + 1


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with client_of(port, 0) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_cancelled_task_ends_its_work(server: ScriptedServer):
    async def use() -> None:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
            task = asyncio.ensure_future(client.completions.create(model=MODEL, prompt="long", max_tokens=400))
            while server.context.client.num_open == 0:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    server.executor.hold()
    asyncio.run(use())
    eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)
    server.assert_idle()
