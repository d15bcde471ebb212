"""Draws of tokens in Triton: the reference's tokens, all of them."""

from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from draws import OFF, columns
from gpu.bench import Bench, equal, poisoned

from kernels import reference
from kernels.triton import sampling

LIMITS = [
    OFF, (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (20, 0.8, 0.0), (0, 0.999, 0.01), (40, 0.95, 0.1),
    (1, 1.0, 0.0), (150, 0.5, 0.0), (0, 1e-6, 0.0), (10**6, 0.6, 0.0), (0, 1.0, 1.0), (5000, 0.99, 0.0),
]  # fmt: skip
"""(top_k, top_p, min_p)"""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    (1, 151936, FP32, 3.0), (2, 151936, BF16, 3.0), (64, 151936, FP32, 3.0), (256, 151936, BF16, 1.0),
    (13, 262144, FP32, 2.0), (512, 32000, FP16, 3.0), (64, 128256, FP32, 0.1), (64, 128256, FP32, 20.0),
    (26, 1000, FP32, 3.0), (7, 63, BF16, 1.0), (5, 1, FP32, 1.0), (130, 49152, BF16, 0.0), (33, 50257, FP16, 5.0),
]  # fmt: skip
"""Rows, vocabulary, dtype, spread. A small spread in bf16, and none, make ties."""


SMALL = {"GROUP": 16, "TILE": 64, "CANDIDATES": 64}


def run(bench: Bench) -> None:
    with poisoned(), small_tiles(bench.is_tiny):
        for rows, vocab, dtype, spread in bench.mine([(3, 150, FP32, 3.0)], CASES):
            with bench.findings.case(f"draws from {rows} x {vocab} {dtype}"):
                check(bench, rows, vocab, dtype, spread)
        with bench.findings.case("rows that are not finite"):
            not_finite(bench, 150 if bench.is_tiny else 151936)


def small_tiles(wanted: bool) -> AbstractContextManager[object]:
    """For the interpreter, to which padding is work like any other."""
    return patch.multiple(sampling, **SMALL) if wanted else nullcontext()


def check(bench: Bench, rows: int, vocab: int, dtype: torch.dtype, spread: float) -> None:
    findings, name = (
        bench.findings,
        f"draw from {rows} x {vocab} {str(dtype).removeprefix('torch.')}, spread {spread:g}",
    )
    logits = bench.rows_apart(bench.normal(rows, vocab, dtype=dtype, seed=vocab) * spread)
    asked = [each.to(bench.device) for each in columns(rows, LIMITS, [1.0, 1.0, 0.6, 1.7, 0.0])]
    found, expected = sampling.draw(logits, *asked), reference.draw(logits, *asked)
    different = int((found != expected).sum())
    findings.verdict(name, not different, f"{different} of {rows} tokens differ" if different else "")
    bench.same_bits(name, lambda: sampling.draw(logits, *asked))
    some = sorted({0, rows - 1})
    for row in some:
        alone = sampling.draw(logits[row : row + 1], *(each[row : row + 1] for each in asked))
        findings.verdict(f"{name}, row {row} alone", equal(alone, found[row : row + 1]))


def not_finite(bench: Bench, vocab: int) -> None:
    logits = bench.normal(5, vocab)
    logits[0, vocab // 2], logits[1] = torch.nan, -torch.inf
    logits[2, 3], logits[3, 1:] = torch.inf, -torch.inf
    for temperature in (0.0, 1.0):
        asked = [each.to(bench.device) for each in columns(5, [OFF, (20, 0.9, 0.0)], [temperature])]
        found = sampling.draw(logits, *asked).tolist()
        right = found[:4] == [-1, -1, -1, 0] and 0 <= found[4] < vocab
        bench.findings.verdict(f"rows that are not finite, temperature {temperature:g}", right, str(found))
