"""What a token costs from the end of the engine's step to the reader: python tests/bench/token_path.py [STREAMS ...]

Three processes, as in service: an engine whose model is a script, the real API server, a reader of all streams. The
model takes PACE seconds a step, asleep; the word it says names the step, so the reader knows when it was drawn.
Columns: from then until the reader has the words of half of the streams, and of all of them (medians over the steps);
and the processor time of a token in the engine's process and in the API server's.
"""

import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import uvloop
from bytetok import FIRST_WORD
from kit import MODEL, ScriptedServer

from engine.messages import RowResult, StepPlan, StepResult
from engine.process import EngineServer

PACE = 0.02
TOKENS = 400
SETTLED = range(50, TOKENS - 50)
"""Steps that are looked at: all streams run."""
WORDS = [f" word{number}" for number in range(TOKENS + 100)]


class PacedExecutor:
    """Says the number of the step, and remembers when it did, and what processor time had been taken by then."""

    def __init__(self) -> None:
        self.said: list[tuple[float, float]] = []
        self._next = time.monotonic()

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, plan: StepPlan, masks: object) -> StepResult:
        now = time.monotonic()
        self._next = max(self._next + PACE, now)
        time.sleep(self._next - now)
        token = FIRST_WORD + len(self.said) % len(WORDS)
        self.said.append((time.monotonic(), time.process_time()))
        rows = [RowResult(slot, [token]) for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        return StepResult(plan.step, rows)

    def shutdown(self) -> None: ...


class Server(ScriptedServer):
    """The kit's, with its engine in a process of its own."""

    said: list[tuple[float, float]]

    def __init__(self, streams: int) -> None:
        self.streams = streams
        super().__init__(
            {},
            words=WORDS,
            num_blocks=streams * (TOKENS // 16 + 4),
            window=TOKENS + 64,
            block_size=16,
            max_num_seqs=streams,
            max_num_batched_tokens=8192,
        )

    def _run_engine(self) -> None:
        command = [sys.executable, __file__, "engine", self._address, str(self.streams)]
        self.said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    def serve_engine(self, address: str) -> None:
        executor = self.executor = PacedExecutor()  # type: ignore[assignment]
        EngineServer(self._build_core, address).run()
        print(json.dumps(executor.said))


async def read(port: int, streams: int) -> None:
    """Prints a line when all streams run, one when the first is about to end, then what came when."""
    came: list[list[tuple[float, str]]] = [[] for _ in range(streams)]
    counts = [0] * streams

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"model": MODEL, "prompt": f"stream {number}", "stream": True, "max_tokens": TOKENS, "ignore_eos": True}
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + data)
        while b"[DONE]" not in (piece := await reader.read(65536)):
            assert piece, "the server has closed the connection"
            came[number].append((time.monotonic(), piece.decode()))
            counts[number] += 1
            if counts[number] == SETTLED.start and min(counts) == SETTLED.start:
                print("begin", flush=True)
            if counts[number] == SETTLED.stop and max(counts) == SETTLED.stop and counts.count(SETTLED.stop) == 1:
                print("end", flush=True)
        writer.close()

    await asyncio.gather(*(one(number) for number in range(streams)))
    print(json.dumps(came))


def measure(streams: int) -> list[float]:
    """Milliseconds until half of the streams and until all have a step's words; microseconds of engine and of API."""
    with Server(streams) as server:
        command = [sys.executable, __file__, "read", str(server.port), str(streams)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            marks = []
            for wanted in ("begin", "end"):
                assert reader.stdout.readline().strip() == wanted
                marks.append((time.monotonic(), time.process_time()))
            came: list[list[tuple[float, str]]] = json.loads(reader.stdout.read())
    (start, api_before), (stop, api_after) = marks
    steps = {step: when for step, (when, _) in enumerate(server.said) if start < when < stop}
    late: dict[int, list[float]] = {step: [] for step in steps}
    for arrivals in came:
        for when, piece in arrivals:
            for word in re.findall(r" word(\d+)", piece):
                if int(word) in late:
                    late[int(word)].append(when - steps[int(word)])
    assert all(len(each) == streams for each in late.values())
    tokens = streams * len(steps)
    engine = server.said[max(steps)][1] - server.said[min(steps)][1]
    half = statistics.median(statistics.median(each) for each in late.values())
    whole = statistics.median(max(each) for each in late.values())
    return [1e3 * half, 1e3 * whole, 1e6 * engine / tokens, 1e6 * (api_after - api_before) / tokens]


def main(arguments: list[Any]) -> None:
    if arguments[:1] == ["engine"]:
        Server(int(arguments[2])).serve_engine(arguments[1])
    elif arguments[:1] == ["read"]:
        asyncio.run(read(int(arguments[1]), int(arguments[2])))
    else:
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # as octavo serve has it
        print(f"{'streams':>8} {'half, ms':>9} {'all, ms':>9} {'engine, us a token':>19} {'API, us a token':>16}")
        for streams in [int(argument) for argument in arguments] or [1, 16, 64]:
            half, whole, engine, api = measure(streams)
            print(f"{streams:>8} {half:>9.2f} {whole:>9.2f} {engine:>19.1f} {api:>16.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
