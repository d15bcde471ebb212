"""How fast prompts attend to themselves, beside torch's own attention on K and V that are not paged."""

from gpu.bench import Bench, Call
from gpu.contexts import Contexts, timed_kind
from torch.nn import functional

from configs.kv import KVFormat

TOKENS, TARGET, GRADED_FROM = 16384, 0.45, 4096
"""Of all prompts together; of a matmul's operations a second, from so many tokens on."""
BESIDE_TORCH = 1.0
"""Times as fast as torch."""


def run(bench: Bench) -> None:
    for length in bench.some([20], [1024, 4096, 16384]):
        with bench.findings.case(f"prompts of {length}"):
            prompts(bench, length)
    for name, sequences, length, rows in bench.some(
        [("prefill", 1, 20, 20), ("a chunk", 1, 20, 4)], [("prefill", 4, 4096, 4096), ("a chunk", 1, 32768, 512)]
    ):
        with bench.findings.case(f"{name} on fp8"):
            contexts = Contexts(bench, timed_kind(bench, KVFormat.FP8_E4M3), sequences, length, rows)
            what = f"{name} fp8 {sequences} x {rows} rows of {length}"
            bench.products(what, contexts.operations, contexts.calls())


def prompts(bench: Bench, length: int) -> None:
    sequences = 1 if bench.is_tiny else TOKENS // length
    contexts = Contexts(bench, timed_kind(bench), sequences, length, rows=length)
    shape, target = f"{sequences} x {length}", TARGET if length >= GRADED_FROM else None
    ours = bench.products(f"prefill bf16 {shape}", contexts.operations, contexts.calls(), target)
    theirs = bench.products(f"  torch, not paged, {shape}", contexts.operations, [plain(contexts)])
    bench.beside("torch", ours, theirs, BESIDE_TORCH)


def plain(contexts: Contexts) -> Call:
    bench, kind = contexts.bench, contexts.kind
    shape = contexts.sequences, kind.kv_heads, contexts.length, kind.head_dim
    k, v = (bench.normal(*shape, dtype=kind.dtype, seed=seed) for seed in (1, 2))
    q = bench.normal(shape[0], kind.kv_heads * kind.group, *shape[2:], dtype=kind.dtype)
    return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
