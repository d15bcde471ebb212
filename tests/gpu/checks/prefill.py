"""How fast prompts attend to themselves, beside torch's own attention on K and V that are not paged."""

import torch
from gpu.bench import Bench
from gpu.contexts import Contexts
from gpu.pages import Kind
from torch.nn import functional

from configs.kv import KVFormat

TOKENS, TARGET = 16384, 0.45
"""Of all prompts together; of a matmul's operations a second, from 4,096 tokens on."""


def run(bench: Bench) -> None:
    kind = Kind(torch.bfloat16, group=4, kv_heads=8, head_dim=128)
    if bench.is_tiny:
        kind = Kind(torch.bfloat16, kv_heads=1, head_dim=32)
    for length in bench.some([20], [1024, 4096, 16384]):
        sequences = 1 if bench.is_tiny else TOKENS // length
        with bench.findings.case(f"prefill {sequences} x {length}"):
            contexts = Contexts(bench, kind, sequences, length, rows=length)
            tell(
                bench, f"prefill bf16 {sequences} x {length}", contexts, bench.seconds(contexts.calls()), length >= 4096
            )
            tell(bench, f"  torch, not paged, {sequences} x {length}", contexts, plain(bench, contexts), False)
    kind = Kind(kind.dtype, (KVFormat.FP8_E4M3,) * 2, kind.group, kind.kv_heads, kind.head_dim)
    with bench.findings.case("prefill on fp8"):
        contexts = Contexts(bench, kind, 1, 20, 20) if bench.is_tiny else Contexts(bench, kind, 4, 4096, 4096)
        tell(
            bench,
            f"prefill fp8 {contexts.sequences} x {contexts.length}",
            contexts,
            bench.seconds(contexts.calls()),
            False,
        )
    with bench.findings.case("a chunk after a long context"):
        contexts = Contexts(bench, kind, 1, 20, 4) if bench.is_tiny else Contexts(bench, kind, 1, 32768, 512)
        tell(
            bench,
            f"  {contexts.rows} rows after {contexts.length}, fp8",
            contexts,
            bench.seconds(contexts.calls()),
            False,
        )


def tell(bench: Bench, what: str, contexts: Contexts, seconds: float, graded: bool) -> None:
    kind, n = contexts.kind, contexts.length
    pairs = contexts.sequences * sum(range(n - contexts.rows + 1, n + 1))
    rate = 4 * pairs * kind.kv_heads * kind.group * kind.head_dim / seconds
    share = rate / bench.ceilings.matmul
    text = f"{seconds * 1e6:9.1f} us  {rate / 1e12:6.1f} TFLOP/s  {share:6.1%} of a matmul"
    text += bench.aim(share, TARGET if graded else None)
    bench.findings.figure(what, text, seconds=seconds, operations_a_second=rate, share=share)


def plain(bench: Bench, contexts: Contexts) -> float:
    kind = contexts.kind
    shape = contexts.sequences, kind.kv_heads, contexts.length, kind.head_dim
    k, v = (bench.normal(*shape, dtype=kind.dtype, seed=seed) for seed in (1, 2))
    q = bench.normal(shape[0], kind.kv_heads * kind.group, *shape[2:], dtype=kind.dtype)
    attend = functional.scaled_dot_product_attention
    return bench.seconds([lambda: attend(q, k, v, is_causal=True, enable_gqa=True)])
