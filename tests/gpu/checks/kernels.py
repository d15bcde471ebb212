"""How much of the memory's speed the short kernels reach, at a prompt's rows and at a decode step's."""

from functools import partial

import torch
from gpu.bench import Bench
from gpu.checks.sampling import small_tiles
from gpu.pages import Kind
from gpu.random_model import QWEN3_06B, TINY, Shape

from configs.kv import KVFormat
from kernels.ops import LayerPages
from kernels.triton import blocks, elementwise, sampling, store

BF16 = torch.bfloat16

UNLIMITED = 0, 1.0, 0.0
DRAWS = (
    ("greedy", 0.0, UNLIMITED),
    ("temperature 1", 1.0, UNLIMITED),
    ("top-k 50, top-p 0.9", 0.8, (50, 0.9, 0.0)),
    ("top-p 0.9", 0.8, (0, 0.9, 0.0)),
)
"""Name, temperature, (top_k, top_p, min_p)"""
FULL = 4096
"""Rows from which on shares of bandwidth are aimed at: of fewer, launching is most of the time."""
SHORT, LAUNCH = 256, 5e-6
"""Rows up to which storing should take no longer than a launch; seconds."""
PINNED = 45e9
"""Bytes a second to and from the host's memory that are aimed at."""
CROWD, FREELY, BESIDE_SORT = 64, 0.7, 3
"""Rows from which on draws are graded: without limits by the share of bandwidth, as if logits were read once; with
limits by how many times as fast as a sort they are."""


def run(bench: Bench) -> None:
    model = TINY if bench.is_tiny else QWEN3_06B
    for rows in bench.some([3], [8192, 256, 1]):
        for measure in (norms, turns, gates, rows_of_tables, stores):
            with bench.findings.case(f"{measure.__name__} of {rows} rows"):
                measure(bench, model, rows)
    for measure_blocks in (copies, swaps):
        with bench.findings.case(f"{measure_blocks.__name__} of blocks"):
            measure_blocks(bench)
    for rows in bench.some([2], [1, 64, 512]):
        with bench.findings.case(f"draws of {rows} rows"), small_tiles(bench.is_tiny):
            draws(bench, model.vocab, rows)


def norms(bench: Bench, model: Shape, rows: int) -> None:
    nbytes = rows * model.hidden * 2 * 4
    weight = torch.ones(model.hidden, dtype=BF16, device=bench.device)
    calls = []
    for _ in range(bench.copies(nbytes)):
        x, residual = bench.normal(rows, model.hidden, dtype=BF16), bench.normal(rows, model.hidden, dtype=BF16)
        calls.append(partial(elementwise.add_rms_norm, x, residual, weight, 1e-6))
    bench.bandwidth(f"add_rms_norm {rows} x {model.hidden}", nbytes, calls, 0.8 if rows >= FULL else None)


def turns(bench: Bench, model: Shape, rows: int) -> None:
    nbytes = rows * (model.heads + model.kv_heads) * model.head_dim * 2 * 2
    weight = torch.ones(model.head_dim, dtype=BF16, device=bench.device)
    cos = sin = torch.ones(rows, model.head_dim // 2, device=bench.device)
    positions = torch.arange(rows, device=bench.device)
    calls = []
    for _ in range(bench.copies(nbytes)):
        fused = bench.normal(rows, (model.heads + 2 * model.kv_heads) * model.head_dim, dtype=BF16).unflatten(
            1, (-1, model.head_dim)
        )
        q, k = fused[:, : model.heads], fused[:, model.heads : model.heads + model.kv_heads]
        calls.append(partial(elementwise.norm_rotary, q, k, weight, weight, 1e-6, positions, cos, sin))
    bench.bandwidth(
        f"norm_rotary {rows} x {model.heads}+{model.kv_heads} heads", nbytes, calls, 0.8 if rows >= FULL else None
    )


def gates(bench: Bench, model: Shape, rows: int) -> None:
    nbytes = rows * model.intermediate * 2 * 3
    xs = [bench.normal(rows, 2 * model.intermediate, dtype=BF16) for _ in range(bench.copies(nbytes))]
    calls = [partial(elementwise.gate_mul, x, "silu") for x in xs]
    bench.bandwidth(f"gate_mul {rows} x {model.intermediate}", nbytes, calls, 0.85 if rows >= FULL else None)


def rows_of_tables(bench: Bench, model: Shape, rows: int) -> None:
    vocab = model.vocab
    table = bench.normal(vocab, model.hidden, dtype=BF16)
    draws = [torch.randint(vocab, (rows,), device=bench.device) for _ in range(bench.copies(rows * model.hidden * 4))]
    calls = [partial(elementwise.gather_rows, table, some, 1.0) for some in draws]
    bench.bandwidth(f"gather_rows {rows} x {model.hidden}", rows * model.hidden * 2 * 2, calls)


def stores(bench: Bench, model: Shape, rows: int) -> None:
    for format in bench.some([KVFormat.INT8], [KVFormat.BF16, KVFormat.FP8_E4M3, KVFormat.INT8, KVFormat.INT4]):
        kind = Kind(BF16, (format, format), kv_heads=model.kv_heads, head_dim=model.head_dim)
        spec, transforms = kind.spec, kind.transforms(bench.device)
        nbytes = rows * (2 * model.kv_heads * model.head_dim * 2 + kind.layer.bytes_per_token())
        calls = []
        for number in range(bench.copies(nbytes)):
            pool = torch.zeros(-(-rows // kind.block_size), spec.block_bytes, dtype=torch.uint8, device=bench.device)
            k, v = (
                bench.normal(rows, model.kv_heads, model.head_dim, dtype=BF16, seed=2 * number + half)
                for half in (0, 1)
            )
            pages, slots = LayerPages(pool, spec, 1, *transforms), torch.arange(rows, device=bench.device)
            calls.append(partial(store.store_kv, k, v, pages, slots))
        goal = 0.85 if rows >= FULL and format is KVFormat.BF16 else None
        within = LAUNCH if rows <= SHORT else None
        bench.bandwidth(f"store_kv {format.value} {rows} x {model.kv_heads} heads", nbytes, calls, goal, within)


def copies(bench: Bench) -> None:
    count, nbytes = (4, 4096) if bench.is_tiny else (512, 1792 << 10)
    pool = torch.zeros(2 * count, nbytes, dtype=torch.uint8, device=bench.device)
    dense = torch.zeros(count, nbytes, dtype=torch.uint8, device=bench.device)
    ids = torch.randperm(2 * count, device=bench.device)[:count]
    moved = 2 * count * nbytes
    name = f"{count} blocks of {nbytes >> 10} KiB"
    bench.bandwidth(f"gather_blocks, {name}", moved, [partial(blocks.gather_blocks, pool, ids, dense)], 0.85)
    bench.bandwidth(f"scatter_blocks, {name}", moved, [partial(blocks.scatter_blocks, dense, ids, pool)], 0.85)
    pairs = [(block, count + block) for block in range(count)]
    copy = partial(blocks.copy_blocks, pool, pairs)  # brings the pairs to the device: not to be captured
    bench.bandwidth(f"copy_blocks, {name}", moved, [copy], 0.85, captured=False)


def swaps(bench: Bench) -> None:
    """To and from the host's memory, beside what a copy of as many bytes in one piece gets."""
    count, nbytes = (4, 4096) if bench.is_tiny else (128, 1792 << 10)
    pool = torch.zeros(2 * count, nbytes, dtype=torch.uint8, device=bench.device)
    host = torch.zeros(count, nbytes, dtype=torch.uint8, pin_memory=not bench.is_tiny)
    ids = torch.randperm(2 * count, device=bench.device)[:count]
    for what, swap, is_graded in (
        ("gather_blocks to pinned memory", partial(blocks.gather_blocks, pool, ids, host), True),
        ("  a copy there", partial(host.copy_, pool[:count], True), False),
        ("scatter_blocks from pinned memory", partial(blocks.scatter_blocks, host, ids, pool), True),
        ("  a copy back", partial(pool[:count].copy_, host, True), False),
    ):
        rate = count * nbytes / bench.seconds([swap], captured=False)
        text = f"{rate / 1e9:.1f} GB/s" + (bench.aim(f"{PINNED / 1e9:g}", rate >= PINNED) if is_graded else "")
        bench.findings.figure(what, text, bytes_a_second=rate)


def draws(bench: Bench, vocab: int, rows: int) -> None:
    nbytes = 4 * rows * vocab
    logits = [bench.normal(rows, vocab, seed=seed) * 3 for seed in range(bench.copies(nbytes))]
    sort = bench.seconds([partial(torch.sort, each, dim=-1, descending=True) for each in logits], captured=False)
    bench.findings.figure(f"torch.sort of {rows} x {vocab}", f"{sort * 1e6:9.1f} us", seconds=sort)
    is_graded = rows >= CROWD
    for words, temperature, limits in bench.some(DRAWS[1:3], DRAWS):
        asked = columns(bench, rows, temperature, limits)
        calls = [partial(sampling.draw, each, *asked) for each in logits]
        is_free = limits == UNLIMITED
        goal = FREELY if is_graded and is_free and temperature else None
        seconds = bench.bandwidth(f"draw {rows} x {vocab}, {words}", nbytes, calls, goal)
        if not is_free:
            bench.beside("torch.sort", seconds, sort, BESIDE_SORT if is_graded else None)


def columns(bench: Bench, rows: int, temperature: float, limits: tuple[int, float, float]) -> list[torch.Tensor]:
    top_k, top_p, min_p = limits
    zeros = torch.zeros(rows, dtype=torch.int64, device=bench.device)
    numbers = [torch.full((rows,), value, device=bench.device) for value in (temperature, top_p, min_p)]
    k = torch.full((rows,), top_k, dtype=torch.int32, device=bench.device)
    return [numbers[0], k, numbers[1], numbers[2], torch.arange(rows, device=bench.device), zeros, zeros]
