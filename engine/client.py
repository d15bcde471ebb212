"""The API process's side of the engine: submits sequences, reads their tokens, turns them into text.

Holds the queue's credits, so that a refusal needs no round trip; watches the child, so that a dead engine fails every
open request at once. Loads no torch.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from engine.admission import Envelope, admit_all
from engine.errors import (
    EngineDead,
    InvalidRequest,
    NotReady,
    RequestAborted,
    RequestFailed,
    StartupError,
    ending,
)
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
    Timings,
    ToEngine,
    TokenOutput,
)
from engine.ports import NoObserver, Observer
from engine.request_stream import RequestStream, Sequence
from engine.sampling_params import SamplingParams
from engine.served_model import ServedModel
from engine.supervisor import STOP_SECONDS, ChildProcess
from engine.text.chat_template import ChatRenderer
from engine.text.output_processor import OutputProcessor
from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer
from engine.waiting_line import QueueLimits, WaitingLine

logger = logging.getLogger("octavo.client")

Phase = Literal["loading", "ready", "draining", "dead"]


class EngineClient:
    """One engine, seen from the API process. All methods belong to one event loop."""

    def __init__(
        self,
        address: str,
        model: ServedModel,
        limits: QueueLimits,
        observer: Observer | None = None,
        on_loading: Callable[[EngineLoading], None] | None = None,
    ) -> None:
        """Binds ADDRESS.in and ADDRESS.out (ipc://, in a folder only this user may enter)."""
        self.model = model
        self.limits = limits
        self.line = WaitingLine(limits)
        self.phase: Phase = "loading"
        self.loading = EngineLoading("starting")
        self.info: EngineReady | None = None
        self.stats = Stats()
        self.failure = ""
        self._observer: Observer = observer or NoObserver()
        self._on_loading = on_loading
        self._open: dict[str, Sequence] = {}
        self._queries: dict[int, asyncio.Future[KVReport | PrefixCacheReset]] = {}
        self._next_query = 0
        self._last_heard = time.monotonic()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.asyncio.Context()
        # The way out is a plain socket: a send to a PUSH without a high-water mark never blocks.
        self._outbox = zmq.Context(self._context).socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.set_hwm(0)
            socket.linger = 500
        self._outbox.bind(f"{address}.in")
        self._inbox.bind(f"{address}.out")
        self._child: ChildProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._start(self._read())
        self._start(self._watch())

    # ------------------------------------------------------------------ life
    @classmethod
    async def start(
        cls,
        launch: Launch,
        model: ServedModel,
        limits: QueueLimits,
        observer: Observer | None = None,
        on_loading: Callable[[EngineLoading], None] | None = None,
    ) -> "EngineClient":
        """Starts an engine process; `ready()` waits for it."""
        child = ChildProcess()
        client = cls(child.address, model, limits, observer, on_loading)
        client._child = child
        await child.spawn(launch)
        client._start(client._outlive(child))
        return client

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """A task for the client's life. If it breaks, nobody would hear the engine any more: everything open fails."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("the client broke", exc_info=error)
                self._die(f"the server broke: {type(error).__name__}: {error}")

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._tasks.append(task)

    async def ready(self) -> EngineReady:
        """Waits until the model is loaded. Raises `StartupError` or `EngineDead`."""
        while self.phase == "loading":
            await self._next_change()
        if self.info is None:
            raise StartupError(self.failure)
        return self.info

    async def ended(self) -> None:
        """Returns once the engine is dead, whatever ended it."""
        await self._ended.wait()

    async def drain(self, timeout: float) -> int:
        """Takes no new work; waits for the open sequences, then fails what is left: so many requests."""
        if self.phase in ("ready", "loading"):
            self._enter("draining")
        deadline = time.monotonic() + timeout
        while self._open and self.phase == "draining" and time.monotonic() < deadline:
            await self._next_change(deadline - time.monotonic())
        message = f"The server is shutting down and the drain time of {timeout:g} s has run out."
        num_failed = 0
        while self._open:
            self._fail_stream(next(iter(self._open.values())), NotReady(message, "draining"))
            num_failed += 1
        return num_failed

    async def close(self, patience: float = STOP_SECONDS) -> None:
        """Ends the engine, by force when it has not gone after `patience` seconds, and the sockets."""
        if self.phase != "dead":
            self._send(Shutdown())
            self._die("the server has shut down", NotReady("The server has shut down.", "draining"))
        if self._child is not None:
            await self._child.stop(patience if self.info is not None else 0.0)  # one that loads hears nothing yet
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._outbox.close(linger=500)  # it hangs on the plain view of the context: `destroy` does not know it
        self._context.destroy(linger=500)

    async def _outlive(self, child: ChildProcess) -> None:
        """The child's end is everybody's: unless it was told to go, everything open fails at once."""
        ending = await child.wait()
        await asyncio.sleep(0.05)  # its last words, if any, are in the socket
        self._die(f"the engine process {ending}")

    # ------------------------------------------------------------------ requests
    async def submit(self, prompts: list[list[int]], params: SamplingParams, envelope: Envelope) -> list[RequestStream]:
        """Queues n sequences of each prompt and returns a stream for each prompt. All are taken or none: raises before
        anything is queued `InvalidRequest`, `ContextLengthExceeded`, `Overloaded`, `NotReady`, `EngineDead`."""
        info = self._require_ready()
        admitted = admit_all(prompts, params, envelope, info)
        requests = [request for choices in admitted for request in choices]
        self._require_room(len(requests), sum(len(request.prompt_token_ids) for request in requests))
        if any(request.request_id in self._open for request in requests):
            raise InvalidRequest(f"A request with the id {envelope.request_id!r} is already running.", "request_id")
        stops = StopStrings(params.stop)
        return [self._open_stream(choices, stops) for choices in admitted]

    def _open_stream(self, requests: list[AddRequest], stops: StopStrings) -> RequestStream:
        """Sends the choices of one prompt."""
        prompt = requests[0].prompt_token_ids
        stream = RequestStream(self.abort, len(prompt))
        for request in requests:
            if self.limits.queue_timeout is not None:
                latest = request.arrival + self.limits.queue_timeout
                request.deadline = min(request.deadline or latest, latest)
            processor = OutputProcessor(
                self.model.tokenizer, request.params, index=request.index, prompt_token_ids=prompt, stops=stops
            )
            sequence = Sequence(request, stream, processor, Timings(request.arrival))
            self._open[request.request_id] = stream.open[request.request_id] = sequence
            if len(self._open) == 1:
                self._last_heard = request.arrival  # an idle engine is rightly silent: the watchdog counts from here
            self.line.sent(len(prompt))
            self._send(request)
        return stream

    def abort(self, sequences: list[Sequence], reason: Literal["abort", "error"] = "abort") -> None:
        """Ends sequences whose reader is gone, or has been told why."""
        alive = [s for s in sequences if self._open.pop(s.request.request_id, None) is not None]
        if alive:
            self._send(AbortRequests([s.request.request_id for s in alive]))
            for sequence in alive:
                self._account(sequence, reason)

    async def kv_report(self, num_events: int = 200, tenant: str | None = None) -> KVReport:
        """State of the pool and its latest events, from the engine itself."""
        report = await self._ask(lambda query_id: KVReportQuery(query_id, num_events, tenant))
        assert isinstance(report, KVReport)
        return report

    async def reset_prefix_cache(self) -> int:
        """Forgets all that is cached and not in use. Returns the number of pages."""
        reset = await self._ask(ResetPrefixCache)
        assert isinstance(reset, PrefixCacheReset)
        return reset.pages

    def abort_request(self, request_id: str) -> int:
        """Ends the sequences of a request by the id that its client knows. Returns how many there were."""
        found = [one for name, one in self._open.items() if name.partition("~")[0] == request_id]
        for sequence in found:
            self._fail_stream(sequence, RequestAborted("The request was aborted by the server's operator."))
        return len(found)

    async def _ask(self, query: Callable[[int], KVReportQuery | ResetPrefixCache]) -> KVReport | PrefixCacheReset:
        self._require_ready(draining=True)
        self._next_query += 1
        query_id = self._next_query
        future: asyncio.Future[KVReport | PrefixCacheReset] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        try:
            self._send(query(query_id))
            return await future
        finally:  # the caller may have given up
            self._queries.pop(query_id, None)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def chat(self) -> ChatRenderer:
        return self.model.chat

    @property
    def num_open(self) -> int:
        """Sequences submitted and not finished."""
        return len(self._open)

    def _age(self) -> float:
        """Seconds since the oldest open sequence came: sequences are kept in that order. 0.0 if there is none."""
        oldest = next(iter(self._open.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.request.arrival

    def queue_is_full(self) -> bool:
        return self.line.is_full(self.stats)

    # ------------------------------------------------------------------ inside
    def _require_ready(self, draining: bool = False) -> EngineReady:
        if self.phase == "dead":
            self._reject("dead")
            raise EngineDead(self.failure)
        if self.phase == "loading":
            self._reject("loading")
            raise NotReady(f"The model is still loading ({self.loading.phase}). Please try again soon.", "loading")
        if self.phase == "draining" and not draining:
            self._reject("draining")
            raise NotReady("The server is shutting down and takes no new requests.", "draining")
        assert self.info is not None
        return self.info

    def _require_room(self, sequences: int, tokens: int) -> None:
        """A request that finds the engine idle is never refused: no later try could do better."""
        refusal = self.line.refusal(self.stats, sequences, tokens, self._age()) if self._open else None
        if refusal is not None:
            self._reject(refusal.reason)
            raise refusal

    def _send(self, message: ToEngine) -> None:
        with contextlib.suppress(zmq.Again):  # there is no engine at the other end: `_outlive` will tell
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            message = self._decoder.decode(await self._inbox.recv())
            await asyncio.sleep(0)  # recv() does not yield when a message is there: readers get their turn all the same
            self._last_heard = time.monotonic()
            match message:
                case StepOutputs():
                    self._take_step(message)
                case EngineLoading():
                    self.loading = message
                    self._observe(self._on_loading, message)
                case EngineReady():
                    self.info = message
                    self._enter("ready" if self.phase == "loading" else self.phase)
                case EngineFailed():
                    self._die(message.message)
                case KVReport() | PrefixCacheReset():
                    future = self._queries.get(message.query_id)
                    if future is not None and not future.done():
                        future.set_result(message)

    def _take_step(self, message: StepOutputs) -> None:
        self.stats = message.stats
        self.line.counted(message.stats)
        self._observe(self._observer.step, message.stats)
        stopped: list[str] = []
        for output in message.outputs:
            sequence = self._open.get(output.request_id)
            if sequence is None:
                continue
            try:
                self._take_output(sequence, output, stopped)
            except Exception:
                logger.exception("request %s: its text could not be made", output.request_id)
                failure = RequestFailed("The answer's text could not be made (see the server's log).")
                self._fail_stream(sequence, failure)
        if stopped:
            self._send(AbortRequests(stopped, "stop"))
        if not self._open:
            self._signal()

    def _take_output(self, sequence: Sequence, output: TokenOutput, stopped: list[str]) -> None:
        sequence.timings = output.timings or sequence.timings
        sequence.num_preemptions = output.num_preemptions
        sequence.cached_tokens = max(sequence.cached_tokens, output.cached_tokens)
        if output.finish_reason == "error":
            failure = self._failure_of(sequence, output)
            self._finish(sequence, "error")
            self._fail_stream(sequence, failure)
            return
        delta = sequence.processor.push(output)
        if delta is None:
            return
        delta.cached_tokens = sequence.cached_tokens
        self._count(sequence, len(delta.token_ids))
        sequence.stream.deliver(delta)
        if sequence.processor.finished:
            if sequence.processor.must_abort:
                stopped.append(sequence.request.request_id)
            self._finish(sequence, delta.finish_reason or "stop")
        elif sequence.stream.is_stalled(self.limits.stall_timeout):
            logger.warning("request %s: aborted, its reader has stalled", sequence.request.request_id)
            self._fail_stream(sequence, RequestAborted("The reader of this stream has stalled."))

    def _fail_stream(self, sequence: Sequence, error: Exception) -> None:
        """Ends the stream that a sequence belongs to, with all its choices."""
        sequence.stream.fail(error)
        self.abort([other for other in self._open.values() if other.stream is sequence.stream], ending(error))

    def _failure_of(self, sequence: Sequence, output: TokenOutput) -> Exception:
        deadline = sequence.request.deadline
        if sequence.timings.first_scheduled == 0.0 and deadline is not None and time.monotonic() >= deadline:
            self._reject("queue_timeout")
            return self.line.timed_out(self.stats, output.error or "The request has waited too long.", self._age())
        return RequestFailed(output.error or "The request failed.")

    def _count(self, sequence: Sequence, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        if sequence.published == 0:
            self._observe(self._observer.first_token, now - sequence.request.arrival)
        else:
            self._observe(self._observer.inter_token, now - sequence.last_published)
        sequence.published += tokens
        sequence.last_published = now
        self._observe(self._observer.published, tokens)

    def _finish(self, sequence: Sequence, reason: Literal["stop", "length", "abort", "error"]) -> None:
        self._open.pop(sequence.request.request_id, None)
        sequence.stream.open.pop(sequence.request.request_id, None)
        if reason != "error":
            self.line.throughput.finished()
        self._account(sequence, reason)

    def _account(self, sequence: Sequence, reason: Literal["stop", "length", "abort", "error"]) -> None:
        self._observe(self._observer.finished, sequence.summary(reason))

    def _reject(self, reason: str) -> None:
        self._observe(self._observer.rejected, reason)

    @staticmethod
    def _observe(callback: Callable[[Any], None] | None, value: Any) -> None:
        """Who counts must never harm who serves."""
        try:
            if callback is not None:
                callback(value)
        except Exception:
            logger.exception("an observer failed")

    async def _watch(self) -> None:
        """Takes an engine that has work and says nothing for dead."""
        limit = self.limits.watchdog_timeout
        while limit is not None:
            tick, before = min(limit / 4, 1.0), time.monotonic()
            await asyncio.sleep(tick)
            late = time.monotonic() - before - tick
            if late > tick:  # this process was stopped, or too busy to listen: that was not the engine's silence
                self._last_heard += late
                continue  # what came meanwhile is read first
            silent = time.monotonic() - self._last_heard
            if self._open and silent > limit and self.phase in ("ready", "draining"):
                self._die(f"the engine has not answered for {silent:.0f} s (--watchdog-timeout {limit:g})")

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._signal()

    def _die(self, message: str, error: Exception | None = None) -> None:
        """Fails everything open with `error`, `EngineDead` unless given."""
        if self.phase == "dead":
            return
        self.failure = message
        self._ended.set()
        self._enter("dead")
        error = error or EngineDead(message)
        for sequence in list(self._open.values()):
            self._account(sequence, ending(error))
            sequence.stream.fail(error)
        self._open.clear()
        for future in self._queries.values():
            if not future.done():
                future.set_exception(error)

    def _signal(self) -> None:
        self._changed.set()

    async def _next_change(self, timeout: float | None = None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)
