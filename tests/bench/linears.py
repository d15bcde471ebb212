"""What the linear layers of SmolLM2-135M cost a step: python tests/bench/linears.py [THREADS]

Milliseconds for 30 x (qkv, o, gate-up, down) and the head at some numbers of rows, best of several alternating runs:
ours; oneDNN as torch prepacks for it (with AMX where there is AMX: rows not exact); reading the packed weights only.
Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 for the exact oneDNN.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from kernels.cpu.linear import HUGE_PAGE
from kernels.ops import linear, pack_linear
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
    theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, 256) for weight in weights]
    print(choose("pack_linear", "cpu", torch.bfloat16).name, "against oneDNN;", num_threads(), "threads")
    print(f"reading {sum(w.nbytes for w in weights) >> 20} MiB: {1e3 * reading_time(weights):.2f} ms")
    print("rows  layers: ours  oneDNN   head: ours  oneDNN   GFLOP/s: ours  oneDNN")
    for rows in ROWS:
        inputs = {k: torch.randn(rows, k).bfloat16() for k, _ in (*LAYER, HEAD)}
        head_rows = min(rows, 128)  # one row a sequence
        head_input = inputs[HEAD[0]][:head_rows]

        def multiply_ours(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for packed, (k, _) in zip(ours[:-1], shapes, strict=False):
                linear(inputs[k], packed)

        def multiply_theirs(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for packed, (k, _) in zip(theirs[:-1], shapes, strict=False):
                onednn(inputs[k], packed)

        def head_ours(x: torch.Tensor = head_input) -> None:
            linear(x, ours[-1])

        def head_theirs(x: torch.Tensor = head_input) -> None:
            onednn(x, theirs[-1])

        times = best([multiply_ours, multiply_theirs, head_ours, head_theirs])
        work = 2e-9 * rows * sum(k * n for k, n in LAYER) * LAYERS
        print(
            f"{rows:4} {1e3 * times[0]:13.2f} {1e3 * times[1]:7.2f} {1e3 * times[2]:12.2f} {1e3 * times[3]:7.2f}"
            f" {work / times[0]:15.0f} {work / times[1]:7.0f}",
            flush=True,
        )


def onednn(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out


def best(runs: list[Callable[[], None]], seconds: float = 1.5) -> list[float]:
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
