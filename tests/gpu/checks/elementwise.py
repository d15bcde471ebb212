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
    for wide in (False, True):
        w = weight.float() if wide else weight
        exact, plain = reference.rms_norm(x.float(), w.float(), EPS), reference.rms_norm(x, w, EPS)
        found = elementwise.rms_norm(x, w, EPS)
        check_error(findings, f"rms_norm {shape}{', wide weight' * wide}", found, exact, plain)
        alone = torch.cat([elementwise.rms_norm(x[row : row + 1], w, EPS) for row in (0, rows - 1)])
        findings.verdict(f"rms_norm {shape}, alone and in company", equal(alone, found[[0, rows - 1]]))
    sums = residual.float() + x.float()
    exact, ours, theirs = reference.rms_norm(sums, weight.float(), EPS), residual.clone(), residual.clone()
    plain, found = reference.add_rms_norm(x, theirs, weight, EPS), elementwise.add_rms_norm(x, ours, weight, EPS)
    check_error(findings, f"add_rms_norm {shape}", found, exact, plain)
    findings.verdict(f"add_rms_norm {shape}, the sum", equal(ours, theirs))
    bench.same_bits(f"add_rms_norm {shape}", lambda: elementwise.add_rms_norm(x, residual.clone(), weight, EPS))


def turns(bench: Bench, rows: int, q_heads: int, k_heads: int, dims: int, pairs: int, dtype: torch.dtype) -> None:
    findings, shape = bench.findings, f"{rows} x {q_heads}+{k_heads} heads of {dims}, {pairs} pairs, {dtype}"
    fused = bench.rows_apart(bench.normal(rows, (q_heads + k_heads) * dims, dtype=dtype, seed=1))
    q, k = fused.split([q_heads * dims, k_heads * dims], 1)
    q, k = q.unflatten(1, (q_heads, dims)), k.unflatten(1, (k_heads, dims))
    positions = torch.randint(5000, (rows,), generator=bench.generator(2), device=bench.device)
    angles = torch.outer(torch.arange(5000.0, device=bench.device), 0.9 ** torch.arange(pairs, device=bench.device))
    cos, sin = angles.cos(), angles.sin()
    weights = [1 + bench.normal(dims, dtype=dtype, seed=seed) for seed in (3, 4)]

    def of(module, norms: bool, wide: bool = False) -> torch.Tensor:
        both = [x.float() if wide else x.clone() for x in (q, k)]
        if norms:
            module.norm_rotary(*both, *(w.float() if wide else w for w in weights), EPS, positions, cos, sin)
        else:
            module.rotary(*both, positions, cos, sin)
        return torch.cat(both, 1)

    for norms in (False, True):
        name = f"{'norm_' * norms}rotary {shape}"
        exact, plain = of(reference, norms, wide=True), of(reference, norms)
        check_error(findings, name, of(elementwise, norms), exact, plain)
        bench.same_bits(name, lambda norms=norms: of(elementwise, norms))
    inside = fused.clone()
    views = (part.unflatten(1, (-1, dims)) for part in inside.split([q_heads * dims, k_heads * dims], 1))
    elementwise.rotary(*views, positions, cos, sin)
    expected = of(elementwise, False).flatten(1)
    findings.verdict(f"rotary {shape}, inside one buffer", equal(inside, expected))


def gates(bench: Bench, rows: int, half: int, dtype: torch.dtype) -> None:
    x = bench.rows_apart(bench.normal(rows, 2 * half, dtype=dtype) * 3)
    for gate in ("silu", "gelu_tanh"):
        name = f"gate_mul {gate} {rows} x {half} {dtype}"
        exact, plain = reference.gate_mul(x.float(), gate), reference.gate_mul(x, gate)
        check_error(bench.findings, name, elementwise.gate_mul(x, gate), exact, plain)
        bench.same_bits(name, lambda gate=gate: elementwise.gate_mul(x, gate))


def tables(bench: Bench, count: int, width: int, rows: int, dtype: torch.dtype) -> None:
    table = bench.normal(count, width, dtype=dtype)
    indices = torch.randint(count, (rows,), generator=bench.generator(2), device=bench.device)
    for scale in (1.0, 24.0):
        found, expected = (module.gather_rows(table, indices, scale) for module in (elementwise, reference))
        name = f"gather_rows {rows} of {count} x {width} {dtype}, times {scale:g}"
        bench.findings.verdict(name, equal(found, expected))
