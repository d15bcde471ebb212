"""S, the scripted server: the real HTTP front end over a real socket, the real client, scheduler and KV manager; only
the model is a script chosen by the prompt.

    with ScriptedServer({"s1": b"ABCDEF"}) as server:
        server.http.post("/v1/completions", json={"model": MODEL, "prompt": "s1"})

The script whose name stands last in the prompt is said, then EOS for ever. Time stands still where a test wants it to:
`executor.hold()` stops the engine before its next step, `executor.allow(n)` lets n steps pass (None: all).
"""

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2
import uvicorn
from bytetok import EOS, IM_END, byte_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from configs.limits import SchedulerLimits
from configs.settings import Settings
from engine.client import EngineClient
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.messages import (
    CacheInfo,
    EngineLoading,
    EngineReady,
    NewRow,
    PromptScores,
    RowResult,
    Shutdown,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from engine.ports import Masks, NoGrammar
from engine.process import EngineServer
from engine.served_model import ServedModel
from engine.text.chat_template import ChatRenderer
from server.app import create_app
from server.context import ServerContext
from server.limits import HTTPLimits
from server.metrics import Metrics
from server.serving import http_config, queue_limits

MODEL = "scripted"
PATIENCE = 20.0
"""Seconds after which a wait in a test is a failure."""

Result = TypeVar("Result")
Script = bytes | Sequence[int] | Callable[[int, int], int]
"""Tokens, or a function of (choice index, position)."""


def endless(index: int, position: int) -> int:
    """A script without an end: the alphabet, over and over."""
    return ord("a") + position % 26


@dataclass
class _Row:
    name: str
    script: Script
    index: int
    position: int
    """Tokens said so far."""
    logprobs: int | None
    scored: int
    vocab_size: int
    prompt: list[int]
    num_computed: int

    def next_token(self) -> int:
        if callable(self.script):
            return self.script(self.index, self.position)
        return self.script[self.position] if self.position < len(self.script) else EOS

    def rank(self, token: int, top: int) -> TokenLogprobs:
        """The script's token is the likeliest; its neighbours by id come next."""
        tops = [token, *((token + step) % self.vocab_size for step in range(1, top))][:top]
        return TokenLogprobs(-0.125, 1, tops, [-0.125 - place for place in range(len(tops))])


class ScriptedExecutor:
    """Implements `Executor`. Faults are set from the test's thread."""

    def __init__(self, scripts: Mapping[str, Script], decode: Callable[[list[int]], str], vocab_size: int) -> None:
        self.fail_after: dict[str, int] = {}
        """Script name -> tokens after which its row fails."""
        self.fatal: Exception | None = None
        """Raised by the next step."""
        self.prompts: list[list[int]] = []
        """As the model saw them."""
        self._scripts, self._decode, self._vocab_size = scripts, decode, vocab_size
        self._rows: dict[int, _Row] = {}
        self._permits: int | None = None
        self._turn = threading.Condition()

    # ------------------------------------------------------------------ the test's side
    def hold(self) -> None:
        self.allow(0)

    def allow(self, steps: int | None) -> None:
        """None: run freely."""
        with self._turn:
            self._permits = steps
            self._turn.notify_all()

    # ------------------------------------------------------------------ the engine's side
    def forward(self, plan: StepPlan) -> StepPlan:
        with self._turn:
            if not self._turn.wait_for(lambda: self._permits != 0, PATIENCE * 2):
                raise TimeoutError("the test never let the engine go on")
            if self._permits is not None:
                self._permits -= 1
        if self.fatal is not None:
            raise self.fatal
        for slot in plan.freed_slots:
            self._rows.pop(slot, None)
        for row in plan.new_rows:
            self._rows[row.slot] = self._new_row(row)
        return plan

    def sample(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        slots = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        scores = {}
        for slot, tokens in zip(plan.slots, plan.num_tokens, strict=True):
            row = self._rows[slot]
            if slot in plan.scored_slots:
                following = row.prompt[row.num_computed + 1 :][:tokens]
                scores[slot] = PromptScores(row.num_computed + 1, [row.rank(token, row.scored) for token in following])
            row.num_computed += tokens
        return StepResult(plan.step, [self._say(slot) for slot in slots], scores)

    def shutdown(self) -> None:
        self._rows.clear()

    def _new_row(self, row: NewRow) -> _Row:
        prompt = row.token_ids[: row.num_prompt_tokens]
        self.prompts.append(prompt)
        text = self._decode(prompt)
        name = max(self._scripts, key=lambda name: (text.rfind(name), len(name)))
        assert name in text, f"no script for {text!r}"
        said = len(row.token_ids) - row.num_prompt_tokens
        params = row.params
        return _Row(
            name, self._scripts[name], row.index, said, params.logprobs, params.prompt_logprobs or 0, self._vocab_size,
            prompt, row.num_computed,
        )  # fmt: skip

    def _say(self, slot: int) -> RowResult:
        row = self._rows[slot]
        if self.fail_after.get(row.name) == row.position:
            return RowResult(slot, [], error="The script says that this row fails.")
        token = row.next_token()
        row.position += 1
        return RowResult(slot, [token], None if row.logprobs is None else [row.rank(token, row.logprobs)])


@dataclass
class Stream:
    """An SSE answer, read to its end."""

    response: httpx2.Response
    raw: str
    frames: list[dict[str, Any]] = field(init=False)
    comments: list[str] = field(init=False)
    num_done: int = field(init=False)

    def __post_init__(self) -> None:
        blocks = [block for block in self.raw.split("\n\n") if block]
        self.comments = [block for block in blocks if block.startswith(":")]
        data = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
        assert len(data) + len(self.comments) == len(blocks), self.raw
        self.num_done = data.count("[DONE]")
        self.frames = [json.loads(block) for block in data if block != "[DONE]"]

    def choices(self, index: int | None = None) -> list[dict[str, Any]]:
        found = [choice for frame in self.frames for choice in frame.get("choices", ())]
        return found if index is None else [choice for choice in found if choice["index"] == index]

    def deltas(self, index: int = 0) -> list[str]:
        """Non-empty texts of one choice, of either endpoint."""
        texts = [c["text"] if "text" in c else c["delta"].get("content") for c in self.choices(index)]
        return [text for text in texts if text]

    def text(self, index: int = 0) -> str:
        return "".join(self.deltas(index))

    def finish(self, index: int = 0) -> str:
        [reason] = [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]
        return reason


class ScriptedServer:
    """`settings` are `Settings` fields. Everything runs in two threads: one for HTTP, one for the engine."""

    def __init__(
        self,
        scripts: Mapping[str, Script],
        *,
        words: Sequence[str] = (),
        num_blocks: int = 256,
        window: int = 512,
        limits: HTTPLimits | None = None,
        loads: threading.Event | None = None,
        send_buffer: int | None = None,
        **settings: Any,
    ) -> None:
        """`words`: tokens beyond single bytes. `loads`: the engine is ready only after this is set.
        `send_buffer`: bytes the kernel keeps for a reader, little more than that."""
        values = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "log_level": "warning", **settings}
        self.settings = Settings.create({**values, "num_gpu_blocks_override": num_blocks})
        self.tokenizer = byte_tokenizer(words)
        self.executor = ScriptedExecutor(
            scripts, lambda ids: self.tokenizer.decode(ids, False), self.tokenizer.vocab_size
        )
        self.context = ServerContext(self.settings, Metrics(), limits=limits or HTTPLimits())
        self.app = create_app(self.context)
        self._window, self._loads = window, loads
        self._folder = tempfile.TemporaryDirectory(prefix="kit-")
        self._listening, self._up, self._down = socket.socket(), threading.Event(), threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        if send_buffer is not None:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self._broken: BaseException | None = None
        self.exit_code: int | None = None
        """The engine's, once it has ended."""
        self.engine_ahead = 0.0
        """Seconds by which the engine's clock, which decides who has waited too long, is ahead of the client's."""

    # ------------------------------------------------------------------ life
    def __enter__(self) -> "ScriptedServer":
        self._listening.bind(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._address = f"ipc://{self._folder.name}/engine"
        self._engine = threading.Thread(target=self._run_engine, name="kit-engine")
        self._http = threading.Thread(target=lambda: asyncio.run(self._serve()), name="kit-http")
        self._http.start()
        assert self._up.wait(PATIENCE) and self._broken is None, self._broken
        key = self.settings.api_key[0] if self.settings.api_key else None
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE, headers=headers)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        if self._loads is not None:
            self._loads.set()
        if self.context.phase == "dead":
            self._server._stopping = True  # an engine that the client took for dead is told nothing
        self.executor.allow(None)
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._stopping.set)
        for thread in (self._http, self._engine):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} hangs"
        self._folder.cleanup()
        assert self._broken is None, self._broken

    def _run_engine(self) -> None:
        self._server = EngineServer(self._build_core, self._address)
        self.exit_code = self._server.run()
        self._down.set()

    def _build_core(self, report: Callable[[EngineLoading], None]) -> tuple[EngineCore, EngineReady]:
        report(EngineLoading("loading weights", 0.5))
        assert self._loads is None or self._loads.wait(PATIENCE)
        settings, blocks = self.settings, self.settings.num_gpu_blocks_override
        assert blocks is not None
        kv = KVManager(blocks, settings.block_size, settings.enable_prefix_caching)
        window = min(self._window, blocks * settings.block_size)
        limits = SchedulerLimits(
            settings.max_num_seqs, settings.max_num_batched_tokens, window, policy=settings.scheduling_policy
        )
        scheduler = Scheduler(limits, kv, {EOS, IM_END})
        cache = CacheInfo(blocks, settings.block_size, 4096, 1024, "fp32", window, settings.enable_prefix_caching)
        core = EngineCore(
            scheduler, self.executor, NoGrammar(), cache, clock=lambda: time.monotonic() + self.engine_ahead
        )
        return core, EngineReady(cache, {"model": MODEL, "dtype": "none"}, self.tokenizer.vocab_size)

    async def _serve(self) -> None:
        self.loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            names = self.settings.served_model_name or (MODEL,)
            model = ServedModel(names, self.tokenizer, ChatRenderer(self.tokenizer), {})
            context = self.context
            context.client = EngineClient(self._address, model, queue_limits(context), context.log)
            self._engine.start()
            ready = asyncio.create_task(context.engine_ready())
            server = uvicorn.Server(http_config(self.app, self.settings))
            answering = asyncio.create_task(server.serve(sockets=[self._listening]))
            if self._loads is None:
                await ready
            self._listening.listen()
            self._up.set()
            await self._stopping.wait()
            context.client._send(Shutdown())  # the engine goes first: it would wait for a reader of its last words
            await asyncio.to_thread(self._engine.join, PATIENCE)
            await context.client.close()
            await asyncio.gather(ready, return_exceptions=True)
            server.should_exit = True
            await answering
        except BaseException as error:
            self._broken = error
            self._up.set()

    def call(self, make: Callable[[], Any]) -> Any:
        """Runs a coroutine on the server's loop and waits for it."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(PATIENCE)

    def wait_engine_down(self) -> int:
        assert self._down.wait(PATIENCE)
        assert self.exit_code is not None
        return self.exit_code

    def in_slow_motion(self, request: Callable[[], Result]) -> Result:
        """What `request` returns; the engine takes a step only when all of the last one has been delivered."""
        self.executor.hold()
        with ThreadPoolExecutor(1) as pool:
            try:
                future = pool.submit(request)
                while not future.done():
                    self.step(future.done)
            finally:
                self.executor.allow(None)
        return future.result()

    def step(self, or_else: Callable[[], bool] = lambda: False) -> None:
        """One step of the engine, and its outputs on their way to the readers. Ends early when `or_else` holds."""
        before = self._steps()
        self.executor.allow(1)
        eventually(lambda: self._steps() > before or or_else())
        self.call(_settle)

    def step_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.step()

    def _steps(self) -> int:
        assert self.context.client is not None
        return self.context.client.stats.steps_total

    # ------------------------------------------------------------------ requests
    def post_chat(
        self, content: str | None = None, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx2.Response:
        messages = {} if content is None else {"messages": [user(content)]}
        return self.http.post("/v1/chat/completions", json={"model": MODEL, **messages, **fields}, headers=headers)

    def post_completion(
        self, prompt: Any = None, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx2.Response:
        prompts = {} if prompt is None else {"prompt": prompt}
        return self.http.post("/v1/completions", json={"model": MODEL, **prompts, **fields}, headers=headers)

    def stream_chat(self, content: str, **fields: Any) -> Stream:
        response = self.post_chat(content, stream=True, **fields)
        assert response.status_code == 200, response.text
        return Stream(response, response.text)

    def stream_completion(self, prompt: Any, **fields: Any) -> Stream:
        response = self.post_completion(prompt, stream=True, **fields)
        assert response.status_code == 200, response.text
        return Stream(response, response.text)

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        response = self.post_chat(content, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def completion(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        response = self.post_completion(prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    @contextlib.contextmanager
    def open_request(self, prompt: str, **fields: Any) -> Iterator[socket.socket]:
        """A raw connection with a completion request under way; leaving the block closes it without a word."""
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 100_000, **fields}).encode()
        with self.connect() as connection:
            connection.sendall(self.head("POST", "/v1/completions", len(body)) + body)
            yield connection

    @contextlib.contextmanager
    def connect(self) -> Iterator[socket.socket]:
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        try:
            yield connection
        finally:
            connection.close()

    def head(self, method: str, path: str, length: int | None = None, **headers: str) -> bytes:
        """A request's head; without a length the body is chunked."""
        size = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
        keys = {"Authorization": f"Bearer {self.settings.api_key[0]}"} if self.settings.api_key else {}
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{k}: {v}" for k, v in {"Host": "kit", **size, **keys, **headers}.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    # ------------------------------------------------------------------ what can be seen
    def metrics(self) -> dict[tuple[str, ...], float]:
        """(name, label=value, …) -> value; the model's and engine's labels left out."""
        seen = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                seen[sample.name, *(f"{key}={value}" for key, value in sorted(labels.items()))] = sample.value
        return seen

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics().get((name, *(f"{key}={value}" for key, value in sorted(labels.items()))), 0.0)

    def wait_running(self, running: int, waiting: int = 0) -> None:
        """As the engine says after it has received all that was sent to it."""
        assert self.context.client is not None
        client = self.context.client
        expected = (running, waiting, client.line.num_sent)
        eventually(lambda: (client.stats.running, client.stats.waiting, client.stats.received_total) == expected)

    def assert_idle(self) -> None:
        """Nothing runs, nothing waits, no page is held, and the server is well."""
        self.wait_running(0)
        seen = self.metrics()
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            assert seen[name,] == 0, name
        assert seen["octavo_kv_tokens_stored",] == 0
        assert self.http.get("/health").status_code == 200


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def receive_until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        chunk = connection.recv(1 << 16)
        assert chunk, received
        received += chunk
    return received


async def _settle() -> None:
    """Every task of the loop that can run has run."""
    for _ in range(20):
        await asyncio.sleep(0)


def eventually(holds: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Waits for what must become true; fails when it does not."""
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
