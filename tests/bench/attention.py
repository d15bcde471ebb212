"""How near decode attention comes to reading memory: python tests/bench/attention.py [THREADS] [CONTEXT] [SEQUENCES]

One token of each of SEQUENCES (1) after CONTEXT others (4,096) through the 30 layers of SmolLM2-135M's shape, pages
read in place and in a shuffled order, for each format of the cache; beside it a plain read of as many bytes as each has
there. Of each layer the best of several alternating runs, added up. About half a minute.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from configs.kv import KVFormat, KVSpec, LayerKV
from engine.runner.kv_store import allocate_pool
from kernels import ops
from kernels.threads import num_threads, set_threads

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
FORMATS = (KVFormat.BF16, KVFormat.FP8_E4M3, KVFormat.FP8_E5M2, KVFormat.INT8, KVFormat.INT4)
SECONDS = 4.0
PAUSE = 0.02
"""Seconds until torch's threads, which made the plain read, no longer spin."""


def main() -> None:
    set_threads(int(sys.argv[1]) if len(sys.argv) > 1 else num_threads())
    torch.set_num_threads(num_threads())  # for the plain read
    context = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    sequences = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    print(f"{num_threads()} threads, {sequences} x {context} tokens")
    for format in FORMATS:
        pages = filled_pages(format, sequences * context)
        size = sequences * context // BLOCK_SIZE * pages[0].spec.block_bytes
        attending, reading = times(pages, context, sequences, size)
        rates = f"{size / attending / 1e9:5.1f} GB/s; a plain read {size / reading / 1e9:5.1f} GB/s"
        print(f"{format.value:9} {1e3 * attending:6.2f} ms, {rates}: {reading / attending:4.0%}", flush=True)


def filled_pages(format: KVFormat, tokens: int) -> list[ops.LayerPages]:
    spec = KVSpec((LayerKV(KV_HEADS, HEAD_DIM, format),) * LAYERS, BLOCK_SIZE)
    pool = allocate_pool(tokens // BLOCK_SIZE, spec.block_bytes, torch.device("cpu"))
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM).bfloat16()
    pages = [ops.LayerPages(pool, spec, layer) for layer in range(LAYERS)]
    for layer in pages:
        ops.store_kv(k, v, layer, torch.arange(tokens))
    return pages


def times(pages: list[ops.LayerPages], context: int, sequences: int, size: int) -> tuple[float, float]:
    """Seconds of all layers' attention, and of reading `size` bytes, in as many parts."""
    q = torch.randn(sequences, HEADS, HEAD_DIM).bfloat16()
    table = torch.randperm(sequences * context // BLOCK_SIZE).to(torch.int32).view(sequences, -1)
    starts, lens = torch.arange(sequences + 1, dtype=torch.int32), torch.full((sequences,), context).to(torch.int32)
    plain = allocate_pool(LAYERS, size // LAYERS // 8 * 8, torch.device("cpu")).view(torch.int64)
    plain.fill_(1)
    best = [[float("inf")] * LAYERS, [float("inf")] * LAYERS]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        time.sleep(PAUSE)
        for layer in range(LAYERS):
            start = time.perf_counter()
            ops.paged_attention(q, pages[layer], table, starts, lens, 0.125)
            best[0][layer] = min(best[0][layer], time.perf_counter() - start)
        for layer in range(LAYERS):
            start = time.perf_counter()
            plain[layer].sum()
            best[1][layer] = min(best[1][layer], time.perf_counter() - start)
    return sum(best[0]), sum(best[1])


if __name__ == "__main__":
    main()
