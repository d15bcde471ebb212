"""Norms, rotary embedding, gates and rows of tables in Triton, against the reference on the same device."""

import torch
from gpu.bench import Bench, check_error, equal, poisoned

from kernels.reference import elementwise as reference
from kernels.triton import elementwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6

NORMS = [
    (1, 1024, BF16), (7, 1024, BF16), (256, 1024, BF16), (4096, 4096, BF16), (33, 5120, FP16), (5, 576, FP32),
    (1000, 8192, BF16), (3, 16384, BF16), (64, 33, FP16), (130, 2000, FP32),
]  # fmt: skip
"""Rows, width, dtype"""
HEADS = [
    (1, 16, 128, BF16),
    (256, 8, 128, BF16),
    (4096, 32, 128, BF16),
    (33, 3, 64, FP16),
    (130, 1, 256, BF16),
    (5, 4, 80, FP32),
]
"""Rows, heads, dims, dtype"""
TURNS = [
    (1, 16, 8, 128, 64, BF16), (256, 16, 8, 128, 64, BF16), (4096, 32, 8, 128, 64, BF16), (77, 9, 3, 64, 32, FP16),
    (33, 8, 1, 256, 128, BF16), (5, 4, 4, 80, 20, FP32), (130, 28, 4, 128, 64, FP16), (2, 71, 1, 64, 32, BF16),
]  # fmt: skip
"""Rows, query heads, key heads, dims, pairs that turn, dtype"""
GATES = [(1, 3072, BF16), (256, 3072, BF16), (4096, 14336, BF16), (33, 1536, FP16), (7, 33, FP32), (100, 9728, FP32)]
TABLES = [(151936, 1024, 256, BF16), (32000, 4096, 4096, BF16), (260, 64, 5, FP32), (49152, 576, 33, FP16)]
"""Rows, width, rows asked for, dtype"""


def run(bench: Bench) -> None:
    with poisoned():
        for rows, width, dtype in bench.some([(5, 96, BF16)], NORMS):
            with bench.findings.case(f"norms of {rows} x {width} {dtype}"):
                norms(bench, rows, width, dtype)
        for rows, heads, dims, dtype in bench.some([(3, 2, 40, BF16)], HEADS):
            with bench.findings.case(f"norms of {rows} x {heads} heads of {dims} {dtype}"):
                norms_of_heads(bench, rows, heads, dims, dtype)
        for shape in bench.some([(3, 4, 2, 32, 12, BF16)], TURNS):
            with bench.findings.case(f"rotary of {shape}"):
                turns(bench, *shape)
        for rows, half, dtype in bench.some([(3, 40, BF16)], GATES):
            with bench.findings.case(f"gates of {rows} x {half} {dtype}"):
                gates(bench, rows, half, dtype)
        for count, width, rows, dtype in bench.some([(50, 40, 3, BF16)], TABLES):
            with bench.findings.case(f"rows of {count} x {width} {dtype}"):
                tables(bench, count, width, rows, dtype)


def norms(bench: Bench, rows: int, width: int, dtype: torch.dtype) -> None:
    findings, shape = bench.findings, f"{rows} x {width} {dtype}"
    x, residual = (bench.rows_apart(bench.normal(rows, width, dtype=dtype, seed=seed)) for seed in (1, 2))
    weight = 1 + bench.normal(width, dtype=dtype, seed=3)
    normed(bench, f"rms_norm {shape}", x, weight)
    sums = residual.float() + x.float()
    exact, ours, theirs = reference.rms_norm(sums, weight.float(), EPS), residual.clone(), residual.clone()
    plain, found = reference.add_rms_norm(x, theirs, weight, EPS), elementwise.add_rms_norm(x, ours, weight, EPS)
    check_error(findings, f"add_rms_norm {shape}", found, exact, plain)
    findings.verdict(f"add_rms_norm {shape}, the sum", equal(ours, theirs))
    bench.same_bits(f"add_rms_norm {shape}", lambda: elementwise.add_rms_norm(x, residual.clone(), weight, EPS))


def norms_of_heads(bench: Bench, rows: int, heads: int, dims: int, dtype: torch.dtype) -> None:
    x = bench.rows_apart(bench.normal(rows, heads, dims, dtype=dtype, seed=1))
    normed(bench, f"rms_norm {rows} x {heads} heads of {dims} {dtype}", x, 1 + bench.normal(dims, dtype=dtype, seed=3))


def normed(bench: Bench, name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """By a weight of x's dtype, and by one of fp32."""
    for wide in (False, True):
        w, what = weight.float() if wide else weight, name + ", wide weight" * wide
        exact, plain = reference.rms_norm(x.float(), w.float(), EPS), reference.rms_norm(x, w, EPS)
        found = elementwise.rms_norm(x, w, EPS)
        check_error(bench.findings, what, found, exact, plain)
        bench.same_bits(what, lambda w=w: elementwise.rms_norm(x, w, EPS))
        ends = [0, len(x) - 1]
        alone = torch.cat([elementwise.rms_norm(x[row : row + 1], w, EPS) for row in ends])
        bench.findings.verdict(f"{what}, alone and in company", equal(alone, found[ends]))


def turns(bench: Bench, rows: int, q_heads: int, k_heads: int, dims: int, pairs: int, dtype: torch.dtype) -> None:
    findings, shape = bench.findings, f"{rows} x {q_heads}+{k_heads} heads of {dims}, {pairs} pairs, {dtype}"
    fused = bench.rows_apart(bench.normal(rows, (q_heads + k_heads) * dims, dtype=dtype, seed=1))

    def heads_of(buffer: torch.Tensor) -> list[torch.Tensor]:
        return [part.unflatten(1, (-1, dims)) for part in buffer.split([q_heads * dims, k_heads * dims], 1)]

    q, k = heads_of(fused)
    positions = torch.randint(5000, (rows,), generator=bench.generator(2), device=bench.device)
    angles = torch.outer(torch.arange(5000.0, device=bench.device), 0.9 ** torch.arange(pairs, device=bench.device))
    cos, sin = angles.cos(), angles.sin()
    own = [1 + bench.normal(dims, dtype=dtype, seed=seed) for seed in (3, 4)]
    wide = [weight.float() for weight in own]

    def of(module, weights: list[torch.Tensor] | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Of both, which are changed."""
        if weights is None:
            module.rotary(q, k, positions, cos, sin)
        else:
            module.norm_rotary(q, k, *weights, EPS, positions, cos, sin)
        return torch.cat([q, k], 1)

    for what, weights in {"rotary": None, "norm_rotary": own, "norm_rotary, wide weights": wide}.items():
        name = f"{what} {shape}"
        exact = of(reference, weights and wide, *(x.to(FP32, copy=True) for x in (q, k)))
        plain, found = (of(module, weights, q.clone(), k.clone()) for module in (reference, elementwise))
        check_error(findings, name, found, exact, plain)
        bench.same_bits(name, lambda weights=weights: of(elementwise, weights, q.clone(), k.clone()))
        inside = of(elementwise, weights, *heads_of(bench.rows_apart(fused)))
        findings.verdict(f"{name}, inside one buffer", equal(inside, found))


def gates(bench: Bench, rows: int, half: int, dtype: torch.dtype) -> None:
    x = bench.rows_apart(bench.normal(rows, 2 * half, dtype=dtype) * 3)
    for gate in ("silu", "gelu_tanh"):
        name = f"gate_mul {gate} {rows} x {half} {dtype}"
        exact, plain = reference.gate_mul(x.double(), gate), reference.gate_mul(x, gate)
        check_error(bench.findings, name, elementwise.gate_mul(x, gate), exact, plain)
        bench.same_bits(name, lambda gate=gate: elementwise.gate_mul(x, gate))


def tables(bench: Bench, count: int, width: int, rows: int, dtype: torch.dtype) -> None:
    table = bench.normal(count, width, dtype=dtype)
    indices = torch.randint(count, (rows,), generator=bench.generator(2), device=bench.device)
    for scale in (1.0, 24.0):
        found, expected = (module.gather_rows(table, indices, scale) for module in (elementwise, reference))
        name = f"gather_rows {rows} of {count} x {width} {dtype}, times {scale:g}"
        bench.findings.verdict(name, equal(found, expected))
        bench.same_bits(name, lambda scale=scale: elementwise.gather_rows(table, indices, scale))
