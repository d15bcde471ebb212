"""Linear layers in Triton: within flash-attn's rule of fp32, or for fp32 that of its products, and exact: the same bits
alone, in company, in any place, whatever the tile. Nothing documents that instructions for another number of rows add
in the same order: here it is asked.
"""

from dataclasses import dataclass
from unittest.mock import patch

import torch
from gpu.bench import Bench, check_error, check_products, equal, poisoned

from kernels.int8_weight import Int8Weight
from kernels.reference import linear as reference
from kernels.triton import linear
from kernels.triton.device import shared_bytes_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COUNTS = (1, 2, 3, 8, 15, 16, 17, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257, 500, 1000, 2049)
"""Rows that are computed by themselves."""


@dataclass(frozen=True)
class Case:
    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype = BF16
    codes: bool = False
    with_bias: bool = False
    all_tiles: bool = False
    """Every tile is tried."""

    def __str__(self) -> str:
        kind = f"{'int8, ' * self.codes}{str(self.dtype).removeprefix('torch.')}{', bias' * self.with_bias}"
        return f"{self.rows} x {self.inputs} to {self.outputs}, {kind}"


TINY = [Case(20, 70, 520, with_bias=True, all_tiles=True), Case(20, 70, 77, FP32, codes=True)]
CASES = [
    Case(4096, 6144, 1024, all_tiles=True), Case(4096, 1024, 2048, with_bias=True, all_tiles=True),
    Case(300, 1024, 3072), Case(300, 151936, 1024), Case(2500, 4096, 4096), Case(300, 28672, 4096),
    Case(300, 4096, 14336, FP16),
    Case(300, 960, 576, FP32, with_bias=True, all_tiles=True), Case(300, 576, 1536, FP32), Case(300, 77, 333),
    Case(2500, 4096, 1024, codes=True, all_tiles=True), Case(2500, 1024, 2048, FP16, codes=True, with_bias=True),
    Case(300, 32000, 896, FP16), Case(1, 1, 1), Case(300, 1152, 6912), Case(300, 2560, 9728, codes=True),
]  # fmt: skip


def run(bench: Bench) -> None:
    with poisoned():
        for case in bench.mine(TINY, CASES):
            with bench.findings.case(f"linear {case}"):
                check(bench, case)


def check(bench: Bench, case: Case) -> None:
    findings, name = bench.findings, f"linear {case}"
    x, weight = bench.normal(case.rows, case.inputs, seed=1), bench.normal(case.outputs, case.inputs, seed=2)
    x, weight = bench.rows_apart(x.to(case.dtype)), weight.to(case.dtype)
    bias = bench.normal(case.outputs, dtype=case.dtype, seed=3) if case.with_bias else None
    wide = torch.float64 if case.dtype is FP32 else FP32
    if case.codes:
        coded = Int8Weight.empty(case.outputs, case.inputs, bench.device)
        coded.fill(slice(None), weight)
        packed = linear.pack_coded_linear(coded, case.dtype, bias)
        plain = reference.pack_coded_linear(coded, case.dtype, bias)(x.contiguous())
        numbers = coded.codes.to(wide) * coded.scales.unsqueeze(1)
    else:
        packed = linear.pack_linear(weight, bias)
        plain = reference.pack_linear(weight, bias)(x.contiguous())
        numbers = weight.to(wide)
    exact = x.to(wide) @ numbers.T
    exact = exact if bias is None else exact + bias
    found = packed(x)
    if case.dtype is FP32:
        check_products(findings, name, found, exact, x, numbers)
    else:
        check_error(findings, name, found, exact, plain)
    del exact, plain, numbers
    findings.verdict(f"{name}, wide", equal(packed(x, wide=True).to(case.dtype), found))
    counts = [rows for rows in COUNTS if rows < case.rows]
    starts = [rows * 37 % (case.rows - rows + 1) for rows in counts]
    differ = [
        rows
        for rows, start in zip(counts, starts, strict=True)
        if not equal(packed(x[start : start + rows]), found[start : start + rows])
    ]
    words = f"{len(differ)} of {len(counts)} numbers of rows differ: {differ}" if differ else ""
    findings.verdict(f"{name}, alone and in company", not differ, words)
    bench.same_bits(name, lambda: packed(x))
    if case.all_tiles:
        tiles(bench, name, packed, x, found)


def tiles(bench: Bench, name: str, packed: linear.TritonLinear, x: torch.Tensor, found: torch.Tensor) -> None:
    """Each that fits, parts apart and folded."""
    room, differ = shared_bytes_of(x.device), []
    fit = [tile for tile in bench.some(linear.TILES[-2:], linear.TILES) if tile.shared_bytes <= room]
    if x.dtype is FP32:
        fit = [tile for tile in fit if tile.rows * tile.outputs <= linear.LARGEST[4]]
    for tile in fit:
        for apart in (False, True):
            with patch.object(linear, "tile_of", lambda *shape, chosen=(tile, apart): chosen):
                if not equal(packed(x), found):
                    differ.append(f"{tile.outputs} outputs x {tile.rows} rows{', parts apart' * apart}")
    words = f"{len(differ)} of {2 * len(fit)} differ: {'; '.join(differ)}" if differ else ""
    bench.findings.verdict(f"{name}, whatever the tile", not differ, words)
