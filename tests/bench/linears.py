"""What the linear layers of SmolLM2-135M cost a step: python tests/bench/linears.py [THREADS]

Milliseconds for 30 x (qkv, o, gate-up, down) and the head at some numbers of rows: ours; ours with int8 weights; oneDNN
as torch prepacks for it (with AMX where there is AMX: rows not exact); reading the packed weights only. Of each layer
the best of several alternating runs, added up, so that other work on the machine shows little. Set
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 for the exact oneDNN.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from kernels.cpu.linear import HUGE_PAGE
from kernels.int8_weight import Int8Weight
from kernels.ops import PackedLinear, linear, pack_linear, pack_linear_int8
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
    theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, 256) for weight in weights]
    print(choose("pack_linear", "cpu", torch.bfloat16).name, "against oneDNN;", num_threads(), "threads")
    print(f"reading {sum(w.nbytes for w in weights) >> 20} MiB: {1e3 * reading_time(weights):.2f} ms")
    print("rows  layers: ours    int8  oneDNN   head: ours    int8  oneDNN   GFLOP/s: ours    int8  oneDNN")
    for rows in ROWS:
        inputs = {k: torch.randn(rows, k).bfloat16() for k, _ in (*LAYER, HEAD)}
        calls = []
        for number, (k, _) in enumerate(shapes):
            x = inputs[k] if number < len(shapes) - 1 else inputs[k][:128]  # of the head one row a sequence
            calls += [
                functools.partial(linear, x, ours[number]),
                functools.partial(linear, x, int8[number]),
                functools.partial(onednn, x, theirs[number]),
            ]
        times = best(calls)
        layers = [sum(times[side:-3:3]) for side in range(3)]
        work = 2e-9 * rows * sum(k * n for k, n in LAYER) * LAYERS
        print(
            f"{rows:4} {1e3 * layers[0]:13.2f} {1e3 * layers[1]:7.2f} {1e3 * layers[2]:7.2f}"
            f" {1e3 * times[-3]:12.2f} {1e3 * times[-2]:7.2f} {1e3 * times[-1]:7.2f}"
            f" {work / layers[0]:15.0f} {work / layers[1]:7.0f} {work / layers[2]:7.0f}",
            flush=True,
        )


def pack_int8(weight: torch.Tensor) -> PackedLinear:
    made = Int8Weight.empty(*weight.shape, weight.device)
    made.fill(slice(0, len(weight)), weight)
    return pack_linear_int8(made, weight.dtype)


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
