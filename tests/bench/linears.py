"""What the linear layers of SmolLM2-135M cost a step: python tests/bench/linears.py [THREADS]

Milliseconds for 30 x (qkv, o, gate-up, down) and the head at some numbers of rows: ours; ours with int8 weights; ours
with weights as a GGUF file has them in Q4_1; oneDNN as torch prepacks for it (with AMX where there is AMX: rows not
exact); reading the packed weights only. Of each layer the best of several alternating runs, added up, so that other
work on the machine shows little. Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 for the exact oneDNN.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from kernels.cpu.linear import HUGE_PAGE
from kernels.grouped_weight import GroupedWeight
from kernels.int8_weight import Int8Weight
from kernels.ops import PackedLinear, linear, pack_coded_linear, pack_linear
from kernels.registry import choose
from kernels.threads import num_threads, set_threads

LAYER = ((576, 960), (576, 576), (576, 3072), (1536, 576))
"""(K, N)"""
LAYERS, HEAD = 30, (576, 49152)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)


def main() -> None:
    set_threads(int(sys.argv[1]) if len(sys.argv) > 1 else num_threads())
    torch.set_num_threads(num_threads())  # for oneDNN
    shapes = [*LAYER * LAYERS, HEAD]
    weights = [torch.randn(n, k).bfloat16() for k, n in shapes]
    ours = [pack_linear(weight) for weight in weights]
    int8 = [pack_int8(weight) for weight in weights]
    stored = [pack_q4_1(*weight.shape) for weight in weights]
    theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, 256) for weight in weights]
    print(choose("pack_linear", "cpu", torch.bfloat16).name, "against oneDNN;", num_threads(), "threads")
    print(f"reading {sum(w.nbytes for w in weights) >> 20} MiB: {1e3 * reading_time(weights):.2f} ms")
    sides = "ours    int8    Q4_1  oneDNN"
    print(f"rows  layers: {sides}   head: {sides}   GFLOP/s: {sides}")
    for rows in ROWS:
        inputs = {k: torch.randn(rows, k).bfloat16() for k, _ in (*LAYER, HEAD)}
        calls = []
        for number, (k, _) in enumerate(shapes):
            x = inputs[k] if number < len(shapes) - 1 else inputs[k][:128]  # of the head one row a sequence
            calls += [
                functools.partial(linear, x, ours[number]),
                functools.partial(linear, x, int8[number]),
                functools.partial(linear, x, stored[number]),
                functools.partial(onednn, x, theirs[number]),
            ]
        times = best(calls)
        layers = [sum(times[side:-4:4]) for side in range(4)]
        work = 2e-9 * rows * sum(k * n for k, n in LAYER) * LAYERS
        print(
            f"{rows:4} {columns(layers, 1e3, 13)} {columns(times[-4:], 1e3, 12)}"
            f" {columns([1 / seconds for seconds in layers], work, 15, 0)}",
            flush=True,
        )


def columns(numbers: Sequence[float], factor: float, width: int, digits: int = 2) -> str:
    """The first column `width` wide."""
    return " ".join(f"{factor * x:{7 if i else width}.{digits}f}" for i, x in enumerate(numbers))


def pack_q4_1(n: int, k: int) -> PackedLinear:
    codes, scales = torch.randint(16, (n, k), dtype=torch.int8), torch.rand(2, n, k // 32).half()
    return pack_coded_linear(GroupedWeight(codes, scales[0], scales[1], bits=4), torch.bfloat16)


def pack_int8(weight: torch.Tensor) -> PackedLinear:
    made = Int8Weight.empty(*weight.shape, weight.device)
    made.fill(slice(0, len(weight)), weight)
    return pack_coded_linear(made, weight.dtype)


def onednn(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out


def best(runs: Sequence[Callable[[], object]], seconds: float = 3.0) -> list[float]:
    """Seconds of each, the best of alternating runs."""
    times = [float("inf")] * len(runs)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            times[i] = min(times[i], time.perf_counter() - start)
    return times


def reading_time(weights: list[torch.Tensor]) -> float:
    """Seconds to read as many bytes as these have, from huge pages: the limit of few rows."""
    from kernels.cpu.linear import WeightMemory

    memory = WeightMemory().take(sum(weight.nbytes for weight in weights) // HUGE_PAGE * HUGE_PAGE).view(torch.int64)
    memory.fill_(1)
    return best([lambda: memory.sum()])[0]


if __name__ == "__main__":
    main()
