"""One life of the server: listen, load, serve, drain, end.

    loading ──> ready ──(signal)──> draining ──> exit 0
       │          └──(engine dies)──> dead ────> exit 1
       └──(cannot start)───────────────────────> StartupError, exit 2

The socket is bound before anything is loaded: a taken port costs nothing, and probes are answered from the start.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator

import uvicorn
import uvloop
from starlette.types import ASGIApp

from configs.settings import Settings
from engine import EngineClient, EngineLoading, Launch, QueueLimits, ServedModel, StartupError, is_json, resolve
from server.aside import Lane
from server.banner import Progress, startup_block
from server.context import ServerContext
from server.http_protocol import BoundedHTTP
from server.tls import load_certificates

logger = logging.getLogger("octavo.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DEAD_SECONDS = 2.0
"""An engine that died: probes and open requests are told for so long, then the process ends."""
FLUSH_SECONDS = 3
"""Time that responses have to reach their readers at the end."""
FORCED_SECONDS = 1.0
CURES = {errno.EADDRINUSE: "choose another with --port", errno.EADDRNOTAVAIL: "choose one of this machine with --host"}
"""By what is in the way of an address; of anything else, either flag."""


class _Server(uvicorn.Server):
    """Signals are `Serving`'s business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Serving:
    def __init__(self, context: ServerContext, app: ASGIApp) -> None:
        self._context = context
        self._http = http_config(app, context.settings)
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._signal = 0
        settings = context.settings
        self._progress = Progress(None if is_json(settings.log_format, sys.stderr) else sys.stderr)

    def run(self) -> int:
        """Returns the exit code. Raises `StartupError`."""
        load_certificates(self._http, self._context.settings)
        listener = bind(self._context.settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(self._main(listener))
        self._leave_threads(code)
        return code

    def _leave_threads(self, code: int) -> None:
        """Ends the process here where a thread still works: the interpreter's own end would stumble over it."""
        if self._context.aside.is_busy:
            logging.shutdown()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)

    async def _main(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        http = _Server(self._http)
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
            gc.collect()
            gc.freeze()  # modules and request shapes live for ever: no collection on the event loop walks them
            self._announce(listener)
            dying = asyncio.create_task(self._context.engine().ended())
            await asyncio.wait({dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not dying.done():
                patience = self._context.settings.shutdown_timeout
                logger.info("draining: open requests have %g s; a second signal (Ctrl-C) stops at once", patience)
                failed = await self._context.engine().drain(patience)
                cut_off = f"still open and cut off: {failed} (--shutdown-timeout)"
                logger.info("drained: %s", cut_off if failed else "all requests have ended")
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
            source = resolve(settings, progress=lambda phase, done: self._report(EngineLoading(phase, done)))
            self._report(EngineLoading("reading the tokenizer"))
            served = ServedModel.load(source, settings)
            return served.launch(source, settings), served

        launch, served = await Lane("fetch-model", 1).run(fetch)
        context.client = await EngineClient.start(launch, served, queue_limits(context), context.log, self._report)
        await context.engine_ready()

    def _report(self, loading: EngineLoading) -> None:
        self._context.loading = loading
        self._progress.report(loading.phase, loading.fraction)

    def _announce(self, listener: socket.socket) -> None:
        self._progress.close()
        client = self._context.engine()
        assert client.info is not None
        host, port = listener.getsockname()[:2]
        chats = client.model.chat.has_template
        block = startup_block(client.model.name, client.info, self._context.settings, host, port, chats=chats)
        print(block, flush=True)

    async def _close(self) -> None:
        self._context.log.throughput.close()
        client = self._context.client
        if client is None:
            return
        if not self._forced.is_set():
            await client.close()
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.close(FORCED_SECONDS / 2), FORCED_SECONDS)

    def _signalled(self, number: int) -> None:
        """The first signal drains, the second ends at once, whatever then still hangs: the engine goes with us."""
        self._signal = number
        if not self._stop.is_set():
            self._stop.set()
        elif not self._forced.is_set():
            self._forced.set()
            last = threading.Timer(2 * FORCED_SECONDS, os._exit, (128 + number,))
            last.daemon = True
            last.start()


def http_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=settings.ssl_keyfile_password,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
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
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host is so long
        reason = getattr(error, "strerror", None) or str(error)
        raise StartupError(f"cannot listen on {host}: {reason} (--host).") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        cure = CURES.get(error.errno or 0, "choose another with --port or --host")
        raise StartupError(f"cannot listen on {host} port {port}: {reason}; {cure}.") from None
    listener.setblocking(False)
    return listener
