"""From deltas to server-sent events, and from a client that has gone to an abort within a step.

Errors before the first token get a real status: the response starts when the first delta exists. A request that waits
longer than the keep-alive interval (in the queue, or for a long prompt) starts its response all the same and gets a
comment line each interval, so that no proxy takes it for dead; an error after that is a frame in the stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine import TextDelta
from server.errors import problem_of
from server.generation import Generation
from server.limits import disconnected
from server.metrics import Metrics
from server.patience import Patience
from server.protocol.answer import DONE, PING, Answer, encode

logger = logging.getLogger("octavo.server")

Result = TypeVar("Result")


class ClientGone(ClientDisconnect):
    """Nobody is there to read an answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
    """`work`'s result. Raises `ClientGone` as soon as the client disconnects, TimeoutError after `timeout` seconds; in
    both cases `work` has been cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone if gone.done() else TimeoutError
    finally:
        await _cancel(task, gone)


async def first_delta(request: Request, generation: Generation, patience: float | None) -> TextDelta | None:
    """The first delta, or None when it takes longer than `patience` seconds. Raises what stands in its way."""
    try:
        return await unless_gone(request, anext(generation), patience)
    except TimeoutError:
        return None


class EventStream(Response):
    """Sends a generation's frames. Owns the generation from the first byte on: however this ends, it is closed."""

    def __init__(
        self, generation: Generation, frames: AsyncGenerator[bytes, None], metrics: Metrics, stall_seconds: float
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._generation = generation
        self._frames = frames
        self._metrics = metrics
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(disconnected(Request(scope, receive)))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            else:
                self._metrics.client_disconnected()
        except TimeoutError:
            logger.warning("a stream's reader took nothing for %g s: given up", self._stall_seconds)
            scope["state"]["given_up"] = True
            scope["state"]["abort"]()  # see http_protocol.py: closed in peace, the connection would wait for its reader
            await gone
        finally:
            self._generation.close()
            await _cancel(pump, gone)

    async def _pump(self, send: Send) -> None:
        """Raises TimeoutError when its reader stalls."""
        patience = Patience(self._stall_seconds)
        try:
            with patience:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._frames) as frames:
                async for data in frames:
                    with patience:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            with patience:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            patience.close()


async def frames_of(
    generation: Generation, answer: Answer, first: TextDelta | None, keep_alive: float | None
) -> AsyncGenerator[bytes, None]:
    """All bytes of an answer's stream. An error becomes one frame, and [DONE] follows in any case: a stream without it
    was cut off."""
    delta, patience = first, Patience(keep_alive)
    try:
        while True:
            if delta is not None and (frames := answer.frames(delta, generation.usage)):
                yield frames
            try:
                with patience:
                    delta = await anext(generation)
            except TimeoutError:
                delta = None
                yield PING
    except StopAsyncIteration:
        yield answer.last_frames(generation.usage)
    except Exception as error:
        problem = problem_of(error)
        if problem.code == "internal_error":
            logger.exception("a stream failed")
        yield b"data: " + encode(problem.body()) + b"\n\n" + DONE
    finally:
        patience.close()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
