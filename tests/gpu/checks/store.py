"""K and V written into pages in Triton: every byte of the pool is the reference's."""

import torch
from gpu.bench import Bench, equal, poisoned
from gpu.pages import POISON, Kind

from configs.kv import KVFormat
from kernels import reference
from kernels.ops import LayerPages
from kernels.triton.store import store_kv

F = KVFormat
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    (Kind(BF16, kv_heads=8, head_dim=128), 4096), (Kind(FP16, block_size=32), 300), (Kind(FP32, head_dim=96), 33),
    (Kind(BF16, (F.FP32, F.FP16), head_dim=80), 100), (Kind(BF16, (F.FP8_E4M3,) * 2, kv_heads=8, head_dim=128), 4096),
    (Kind(BF16, (F.FP8_E5M2,) * 2, kv_heads=8, head_dim=128), 256),
    (Kind(BF16, (F.INT8,) * 2, kv_heads=8, head_dim=128), 4096),
    (Kind(BF16, (F.INT4,) * 2, kv_heads=8, head_dim=128), 1000), (Kind(FP16, (F.INT8, F.INT4), block_size=32), 77),
    (Kind(FP32, (F.INT4, F.FP8_E4M3), head_dim=96), 70), (Kind(BF16, (F.BF16, F.INT4), head_dim=256, kv_heads=2), 50),
    (Kind(BF16, (F.FP8_E5M2, F.INT8), head_dim=80, kv_heads=7), 90), (Kind(FP16, (F.INT8, F.BF16), kv_heads=1), 1),
    (Kind(BF16, (F.INT8,) * 2, static=True, head_dim=128), 300), (Kind(BF16, (F.FP8_E4M3,) * 2, static=True), 300),
    (Kind(FP16, (F.INT8, F.FP8_E4M3), static=True, head_dim=80), 40), (Kind(BF16, (F.INT4, F.INT8), static=True), 60),
    (Kind(BF16, (F.INT4,) * 2, block_size=128, head_dim=32, kv_heads=3), 500),
    (Kind(FP32, (F.INT4,) * 2, centred=False), 64),
]  # fmt: skip
"""A layer, tokens"""
FAR = [(Kind(BF16, kv_heads=8, head_dim=128), 33000), (Kind(BF16, (F.INT8,) * 2, kv_heads=8, head_dim=128), 66000)]
"""A layer, blocks of its pool: past what 32 bits count"""
TINY = [(Kind(BF16, kv_heads=1, head_dim=32), 3), (Kind(BF16, (F.INT8, F.FP8_E4M3), kv_heads=1, head_dim=32), 3)]


def run(bench: Bench) -> None:
    with poisoned():
        for kind, tokens in bench.mine(TINY, CASES):
            with bench.findings.case(f"store_kv of {kind}"):
                check(bench, kind, tokens)
        for kind, num_blocks in bench.mine([], FAR):
            with bench.findings.case(f"store_kv of {kind} far away"):
                check(bench, kind, 100, num_blocks)


def check(bench: Bench, kind: Kind, tokens: int, num_blocks: int | None = None) -> None:
    spec, size = kind.spec, kind.block_size
    span = tokens // size + 2
    total = num_blocks or span
    whole = torch.full((total, spec.block_bytes), POISON, dtype=torch.uint8, device=bench.device)
    slots = torch.randperm(span * size, generator=torch.Generator().manual_seed(3))[:tokens].to(bench.device)
    far = slots + (total - span) * size
    far[3::7] = slots[3::7] = -1
    transforms = kind.transforms(bench.device)
    k, v = (inputs(bench, kind, tokens, seed) for seed in (1, 2))
    near = torch.full((span, spec.block_bytes), POISON, dtype=torch.uint8, device=bench.device)
    reference.store_kv(k, v, LayerPages(near, spec, 1, *transforms), slots)
    pages = LayerPages(whole, spec, 1, *transforms)
    store_kv(k, v, pages, far)
    found = whole[total - span :]
    wrong = int((found != near).sum())
    name = f"store_kv {tokens} tokens, {kind}" + (f", {total} blocks" if num_blocks else "")
    bench.findings.verdict(name, wrong == 0, f"{wrong} bytes differ" if wrong else "")
    if num_blocks:
        untouched = int((whole[: total - span] != POISON).sum())
        bench.findings.verdict(f"{name}, touches no others", untouched == 0)
        return

    def again() -> torch.Tensor:
        whole.fill_(POISON)
        store_kv(k, v, pages, far)
        return whole

    bench.same_bits(name, again)
    whole.fill_(POISON)
    for token in range(tokens if tokens < 40 else 3):
        slot = far[token : token + 1].clone()  # as aligned as an engine's
        store_kv(k[token : token + 1], v[token : token + 1], pages, slot)
    some = torch.full_like(near, POISON)
    count = tokens if tokens < 40 else 3
    store_kv(k[:count], v[:count], LayerPages(some, spec, 1, *transforms), slots[:count])
    bench.findings.verdict(f"{name}, alone and in company", equal(whole[total - span :], some))


def inputs(bench: Bench, kind: Kind, tokens: int, seed: int) -> torch.Tensor:
    """With rows that are large, tiny, zero and, where codes follow, not finite; rows lie apart."""
    x = bench.normal(tokens, kind.kv_heads, kind.head_dim, seed=seed)
    for token, factor in enumerate([1e-7, 1e4, 0.0, -0.0, 3e3][: tokens - 1]):
        x[token] *= factor
    if tokens > 12 and all(format.is_quantised for format in kind.layer.formats):
        x[8, 0, 1], x[9, -1, -1], x[11, 0, -2] = torch.inf, torch.nan, -torch.inf
    return bench.rows_apart(x.to(kind.dtype))
