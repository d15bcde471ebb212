"""One life of the server: listen, load, serve, drain, end.

    loading ──> ready ──(signal)──> draining ──> exit 0
       │          └──(engine dies)──> dead ────> exit 1
       └──(cannot start)───────────────────────> StartupError, exit 2

The socket is bound before anything is loaded: a taken port costs nothing, and probes are answered from the start.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from configs.settings import Settings
from engine import EngineClient, EngineLoading, Launch, QueueLimits, ServedModel, StartupError, resolve
from server.banner import Progress, startup_block
from server.context import ServerContext
from server.http_protocol import BoundedHTTP

logger = logging.getLogger("octavo.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DEAD_SECONDS = 2.0
"""An engine that died: probes and open requests are told for so long, then the process ends."""
FLUSH_SECONDS = 3
"""Time that responses have to reach their readers at the end."""
FORCED_SECONDS = 1.0

Result = TypeVar("Result")


class _Server(uvicorn.Server):
    """Signals are `Serving`'s business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    def __init__(self, context: ServerContext, app: ASGIApp) -> None:
        self._context = context
        self._app = app
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._signal = 0
        self._progress = Progress(sys.stderr)

    def run(self) -> int:
        """Returns the exit code. Raises `StartupError`."""
        listener = bind(self._context.settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._main(listener))

    async def _main(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        http = _Server(http_config(self._app))
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        answering = asyncio.create_task(http.serve(sockets=[listener]))
        living = asyncio.create_task(self._live(listener))
        forced = asyncio.create_task(self._forced.wait())
        try:
            await asyncio.wait({living, forced}, return_when=asyncio.FIRST_COMPLETED)
            return living.result() if living.done() else 128 + self._signal
        finally:
            http.should_exit, http.force_exit = True, self._forced.is_set()
            for task in (living, forced):
                task.cancel()
            await asyncio.gather(living, forced, answering, return_exceptions=True)
            await self._close()

    async def _live(self, listener: socket.socket) -> int:
        """From loading to the last response. Returns the exit code."""
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return 0
            loading.result()
            self._announce(listener)
            dying = asyncio.create_task(self._context.engine().ended())
            await asyncio.wait({dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not dying.done():
                logger.info("draining; open requests have %g s", self._context.settings.shutdown_timeout)
                await self._context.engine().drain(self._context.settings.shutdown_timeout)
            if self._context.phase == "dead":
                logger.error("the engine has stopped: %s", self._context.engine().failure)
                await asyncio.sleep(DEAD_SECONDS)
                return 1
            dying.cancel()
            return 0
        finally:
            loading.cancel()
            stopping.cancel()
            self._progress.close()

    async def _load(self) -> None:
        """Finds the model's files, reads its text side, starts the engine. Raises `StartupError`."""
        context, settings = self._context, self._context.settings

        def fetch() -> tuple[Launch, ServedModel]:
            source = resolve(settings.model, progress=lambda phase, done: self._report(EngineLoading(phase, done)))
            self._report(EngineLoading("reading the tokenizer"))
            served = ServedModel.load(source, settings)
            return served.launch(source, settings), served

        launch, served = await _in_thread(fetch)
        context.client = await EngineClient.start(launch, served, queue_limits(context), context.metrics, self._report)
        await context.engine_ready()

    def _report(self, loading: EngineLoading) -> None:
        self._context.loading = loading
        self._progress.report(loading.phase, loading.fraction)

    def _announce(self, listener: socket.socket) -> None:
        self._progress.close()
        client = self._context.engine()
        assert client.info is not None
        host, port = listener.getsockname()[:2]
        print(startup_block(client.model.name, client.info, self._context.settings, host, port), flush=True)

    async def _close(self) -> None:
        if self._context.client is not None:
            limit = FORCED_SECONDS if self._forced.is_set() else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._context.client.close(), limit)

    def _signalled(self, number: int) -> None:
        """The first signal drains, the second ends at once."""
        (self._forced if self._stop.is_set() else self._stop).set()
        self._signal = number


def http_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHTTP,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


def queue_limits(context: ServerContext) -> QueueLimits:
    settings = context.settings
    return QueueLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        queue_timeout=settings.queue_timeout,
        watchdog_timeout=settings.watchdog_timeout,
        stall_timeout=context.limits.stall_seconds,
    )


def bind(settings: Settings) -> socket.socket:
    """Raises `StartupError` where the address cannot be had."""
    host, port = settings.bind_host, settings.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}: {error.strerror or error} (--host).") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise StartupError(f"cannot listen on {host} port {port}: {reason}; choose another with --port.") from None
    listener.setblocking(False)
    return listener


async def _in_thread(work: Callable[[], Result]) -> Result:
    """A daemon thread's result: unlike the loop's executor it does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(done: Callable[[], None]) -> None:
        if not future.cancelled():
            done()

    def run() -> None:
        try:
            done = partial(future.set_result, work())
        except BaseException as error:
            done = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
            loop.call_soon_threadsafe(settle, done)

    threading.Thread(target=run, name="fetch-model", daemon=True).start()
    return await future
