"""The engine process: takes messages, steps the core, sends one message a step.

    python -m engine.process ADDRESS < settings.json, then standard input stays open as long as the parent lives

The same `EngineServer` runs in a thread of the tests.
"""

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec
import zmq

from engine.core.loop import EngineCore
from engine.errors import InvalidRequest, OctavoError, StartupError
from engine.logs import configure_logging
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineLoading,
    EngineReady,
    FromEngine,
    KVReport,
    KVReportQuery,
    Launch,
    PrefixCacheReset,
    ResetPrefixCache,
    Shutdown,
    Stats,
    StepOutputs,
    ToEngine,
    TokenOutput,
)

logger = logging.getLogger("octavo.engine")

CoreFactory = Callable[[Callable[[EngineLoading], None]], tuple[EngineCore, EngineReady]]
"""Builds the core; reports its progress through the argument."""

IDLE_POLL_MS = 1000
YOUNG_OBJECTS = 50_000
"""Made since the last collection before there is another. A step's rows and outputs, some thousands, are gone with the
next step, without any collection; walking them took a sixth of the host's time with 1,024 sequences."""


class EngineServer:
    """Serves one core to one API process over a pair of ipc sockets."""

    def __init__(self, build_core: CoreFactory, address: str) -> None:
        """`address`: an ipc:// prefix; the API process has bound ADDRESS.in (to us) and ADDRESS.out (from us)."""
        self._build_core = build_core
        self._address = address
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._received = 0
        self._stopping = False

    def run(self) -> int:
        """Until `Shutdown` or a fatal error. Returns the process's exit code: 0, 1 (died) or 2 (could not start)."""
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)  # the engine never blocks on a send; the API process drains and bounds the queue
        self._inbox.connect(f"{self._address}.in")
        self._outbox.connect(f"{self._address}.out")
        try:
            return self._load_and_serve()
        finally:
            context.destroy(linger=1000)

    def _load_and_serve(self) -> int:
        try:
            core, ready = self._build_core(self._send)
        except StartupError as error:
            self._send(EngineFailed(str(error), startup=True))
            return 2
        except Exception as error:
            logger.exception("the engine could not start")
            self._send(EngineFailed(f"the engine could not start: {type(error).__name__}: {error}", startup=True))
            return 2
        gc.collect()
        gc.freeze()  # the model's and the pool's objects live for ever: no collection needs to walk them
        gc.set_threshold(YOUNG_OBJECTS)
        self._send(StepOutputs([], self._stats(core)))  # gauges are right from the moment it is ready
        self._send(ready)
        try:
            self._serve(core)
        except Exception as error:
            logger.exception("the engine died")
            self._send(EngineFailed(f"the engine died: {type(error).__name__}: {error}", startup=False))
            return 1
        finally:
            core.shutdown()
        return 0

    def _serve(self, core: EngineCore) -> None:
        checked = True
        while not self._stopping:
            if not core.has_work and not self._inbox.poll(IDLE_POLL_MS) and not checked:
                self._check(core)
                checked = True
            self._take_messages(core)
            if core.has_work:
                outputs = core.step()
                self._send(StepOutputs(outputs, self._stats(core)))
                checked = False

    def _check(self, core: EngineCore) -> None:
        """Nobody waits: time to look whether the books are in order. An error here would be a bug of ours, and what is
        served since then may still be right: it is told, not died of."""
        try:
            core.check()
        except AssertionError:
            logger.exception("the KV manager's books are not in order; please report this")

    def _take_messages(self, core: EngineCore) -> None:
        changed = False
        while True:
            try:
                message = self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            changed = changed or not isinstance(message, KVReportQuery)  # to look changes no gauge
            match message:
                case AddRequest():
                    self._received += 1
                    self._add(core, message)
                case AbortRequests():
                    core.abort(message.request_ids, message.reason)
                case KVReportQuery():
                    events = core.events(message.num_events, message.tenant)
                    self._send(KVReport(message.query_id, core.memory_stats(), events))
                case ResetPrefixCache():
                    self._send(PrefixCacheReset(message.query_id, core.reset_prefix_cache()))
                case Shutdown():
                    self._stopping = True
        if changed and not core.has_work:  # aborts alone: nothing will step, yet the gauges changed
            self._send(StepOutputs([], self._stats(core)))

    def _add(self, core: EngineCore, request: AddRequest) -> None:
        """The API process has validated it; what the core refuses all the same fails that request alone."""
        try:
            core.add(request)
        except InvalidRequest as error:
            refused = TokenOutput(request.request_id, [], finish_reason="error", error=error.message)
            self._send(StepOutputs([refused], self._stats(core)))

    def _stats(self, core: EngineCore) -> Stats:
        stats = core.stats()
        stats.received_total = self._received
        return stats

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))


def _exit_with_parent() -> None:
    """Ends this process when standard input closes: the parent is gone, however it went."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> int:
    """Entry of the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from engine.build import build_core  # torch: seconds

    address = sys.argv[1]
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    configure_logging(launch.settings["log_level"], launch.settings["log_format"])
    _exit_with_parent()
    return EngineServer(lambda report: build_core(launch, report), address).run()


if __name__ == "__main__":
    try:
        code = main()
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    os._exit(code)  # no destructors of native libraries at exit: the sockets have lingered, nothing else matters
