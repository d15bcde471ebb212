"""What a step costs on the host, apart from the model: python tests/bench/host_loop.py [RUNNING ...]

An executor that does nothing answers every plan. Each line: all running sequences decode; medians over the steps.
Columns: scheduling and updating alone, and the whole of EngineCore.step with the null executor and a stats snapshot.
"""

import gc
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from configs.limits import SchedulerLimits
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.messages import AddRequest, CacheInfo, RowResult, StepPlan, StepResult
from engine.ports import NoGrammar
from engine.process import YOUNG_OBJECTS
from engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT = 100
STEPS = 400


class NullExecutor:
    """Every row draws token 1."""

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, handle: StepPlan, masks: object) -> StepResult:
        rows = [RowResult(slot, [1]) for slot, samples in zip(handle.slots, handle.samples, strict=True) if samples]
        return StepResult(handle.step, rows)

    def shutdown(self) -> None: ...


def build(running: int) -> EngineCore:
    """A core whose sequences are all decoding."""
    blocks = running * ((PROMPT + STEPS + 64) // BLOCK_SIZE + 2)
    limits = SchedulerLimits(max_num_seqs=running, max_num_batched_tokens=max(8192, running), max_model_len=4096)
    kv = KVManager(blocks, BLOCK_SIZE)
    cache = CacheInfo(blocks, BLOCK_SIZE, 4096, 256, "bf16", 4096, True)
    core = EngineCore(Scheduler(limits, kv, {0}), NullExecutor(), NoGrammar(), cache)
    params = SamplingParams(max_tokens=None)
    for number in range(running):
        prompt = [2 + number * 7 % 50_000] + [(number * 131 + place * 17) % 50_000 + 2 for place in range(PROMPT - 1)]
        core.add(AddRequest(request_id=f"r{number}", prompt_token_ids=prompt, params=params, arrival=0.0))
    while core.stats().running < running or core.stats().scheduled_tokens != running:
        core.step()
    return core


def measure(running: int) -> tuple[float, float]:
    """(scheduling and updating, everything): median milliseconds a step."""
    core = build(running)
    gc.collect()
    gc.freeze()  # as the engine does when it has started
    gc.set_threshold(YOUNG_OBJECTS)
    part, whole = [], []
    for _ in range(STEPS):
        before = core.stats()
        start = time.perf_counter()
        core.step()
        after = core.stats()
        whole.append(time.perf_counter() - start)
        part.append(
            after.schedule_seconds_total
            - before.schedule_seconds_total
            + after.update_seconds_total
            - before.update_seconds_total
        )
    assert core.stats().running == running
    return statistics.median(part) * 1e3, statistics.median(whole) * 1e3


def main() -> None:
    print(f"{'running':>8} {'schedule+update':>16} {'whole step':>11}   ms, median of {STEPS} steps")
    for running in [int(argument) for argument in sys.argv[1:]] or [1, 16, 64, 256, 1024]:
        part, whole = measure(running)
        print(f"{running:>8} {part:>16.4f} {whole:>11.4f}")


if __name__ == "__main__":
    main()
