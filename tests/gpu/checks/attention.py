"""Paged attention in Triton: within flash-attn's rule of fp32, and exact: the same bits alone, in company, in any
chunks, every time."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from error_rule import times_plain
from gpu.bench import Bench, check_error, equal, poisoned
from gpu.pages import Kind, Part, Sequences

from configs.kv import KVFormat
from kernels import reference
from kernels.triton import attention
from kernels.triton.attention import paged_attention

F = KVFormat
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LARGE = {"kv_heads": 8, "head_dim": 128}
MIXED = [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1025, 3000]
ROWS = [1, 2, 16, 1, 40, 1, 65, 1, 512, 3, 1, 700]
"""Of each of those, the last so many"""
Case = tuple[Kind, dict[str, Any]]
CASES: list[Case] = [
    (Kind(BF16, **LARGE), {}),
    (Kind(BF16, **LARGE), {"window": 600}),
    (Kind(BF16, **LARGE), {"softcap": 30.0}),
    (Kind(BF16, **LARGE), {"sinks": True}),
    (Kind(FP16, group=4, **LARGE), {}),
    (Kind(FP32, group=3, kv_heads=3, head_dim=64), {}),
    (Kind(FP32, kv_heads=2, head_dim=256), {}),
    (Kind(BF16, group=1, kv_heads=6, head_dim=96, block_size=32), {"window": 64, "softcap": 50.0}),
    (Kind(BF16, group=7, kv_heads=4, head_dim=128), {}),
    (Kind(BF16, group=8, kv_heads=2, head_dim=256, block_size=32), {}),
    (Kind(BF16, group=3, kv_heads=2, head_dim=80), {"sinks": True, "window": 130}),
    (Kind(BF16, (F.FP8_E4M3,) * 2, **LARGE), {}),
    (Kind(BF16, (F.FP8_E5M2,) * 2, **LARGE), {}),
    (Kind(BF16, (F.INT8,) * 2, **LARGE), {}),
    (Kind(BF16, (F.INT4,) * 2, **LARGE), {}),
    (Kind(BF16, (F.INT8, F.INT4), group=4, head_dim=96, block_size=32), {"window": 100}),
    (Kind(BF16, (F.INT4, F.FP8_E4M3), group=3), {"sinks": True}),
    (Kind(FP16, (F.INT8,) * 2), {}),
    (Kind(FP32, (F.INT4, F.INT8)), {}),
    (Kind(BF16, (F.BF16, F.INT4), group=7), {}),
    (Kind(BF16, (F.FP8_E4M3,) * 2, static=True, **LARGE), {}),
    (Kind(BF16, (F.INT8,) * 2, static=True, centred=False), {"softcap": 20.0}),
]
ROWS_ALONE, SPLITS_ALONE, IN_ROUNDS = {"PREFILL_HEADS": 0}, {"PREFILL_HEADS": 2**30, "STATES": 2**40}, {"STATES": 1}
"""Prompts by rows; by splits as decoding is, with room for all partial results; single rows one sequence at a time."""
FAR = [(Kind(BF16, **LARGE), 33000), (Kind(BF16, (F.INT4,) * 2, **LARGE), 130000)]
"""A layer, blocks of its pool: past what 32 bits count"""
TINY: list[Case] = [
    (Kind(BF16, head_dim=32, kv_heads=1), {}),
    (Kind(BF16, (F.INT8, F.INT4), head_dim=32, kv_heads=1), {"window": 20}),
]


def run(bench: Bench) -> None:
    lengths, rows = ([17, 40], [1, 3]) if bench.is_tiny else (MIXED, ROWS)
    with poisoned():
        for kind, asked in bench.mine(TINY, CASES):
            with bench.findings.case(f"attention, {words(kind, asked)}"):
                check(bench, kind, asked, lengths, rows)
        for kind, num_blocks in bench.mine([], FAR):
            with bench.findings.case(f"attention, {kind} far away"):
                far(bench, kind, num_blocks)


def words(kind: Kind, asked: dict[str, Any]) -> str:
    return ", ".join([str(kind), *(f"{name} {value}" for name, value in asked.items())])


def check(bench: Bench, kind: Kind, asked: dict[str, Any], lengths: Sequence[int], rows: Sequence[int]) -> None:
    findings, name = bench.findings, words(kind, asked)
    if "sinks" in asked:
        asked = asked | {"sinks": torch.linspace(-2, 3, kind.group * kind.kv_heads, device=bench.device)}
    sequences = Sequences(bench, kind, lengths)
    parts = [(b, n - count, n) for b, (n, count) in enumerate(zip(lengths, rows, strict=True))]
    with by(ROWS_ALONE):
        found = sequences.attend(paged_attention, parts, **asked)
    exact = sequences.attend(reference.paged_attention, parts, wide=True, **asked)
    plain = torch.cat([sequences.plain(part, **asked) for part in parts])
    # A weight of bf16 is rounded with its token's scale in it, where plain torch has none to round. Products of fp32,
    # three of tf32 whose sums are truncated, are off by 3e-6 at most with scores and values of this size, also where a
    # tile's sums are all in one chain: the rule's 1e-5 has room for that, and none for one product of tf32 (1e-3).
    check_error(findings, f"attention, {name}", found, exact, plain, times_plain(kind.layer, kind.dtype))
    with by(ROWS_ALONE):
        bench.same_bits(f"attention, {name}, by rows", lambda: sequences.attend(paged_attention, parts, **asked))
    with by(SPLITS_ALONE):
        bench.same_bits(f"attention, {name}, by splits", lambda: sequences.attend(paged_attention, parts, **asked))
        splits = sequences.attend(paged_attention, parts, **asked)
    findings.verdict(f"attention, {name}, by splits and by rows", equal(splits, found))
    with by(IN_ROUNDS):
        rounds = sequences.attend(paged_attention, parts, **asked)
    findings.verdict(f"attention, {name}, in rounds", equal(rounds, found))
    alone = torch.cat([sequences.attend(paged_attention, [part], **asked) for part in parts])
    findings.verdict(f"attention, {name}, alone and in company", equal(alone, found))
    findings.verdict(f"attention, {name}, upside down", equal(reversed_order(sequences, parts, asked), found))
    for chunk in bench.some([1], [1, 33]):
        findings.verdict(
            f"attention, {name}, in chunks of {chunk}", in_chunks(sequences, parts[-1], chunk, asked, found)
        )


def by(way: dict[str, int]) -> AbstractContextManager[object]:
    return patch.multiple(attention, **way)


def reversed_order(sequences: Sequences, parts: Sequence[Part], asked: dict[str, Any]) -> torch.Tensor:
    """The same rows, sequences computed in the other order: prompts first, single rows last."""
    out = sequences.attend(paged_attention, parts[::-1], **asked)
    return torch.cat(out.split([last - first for _, first, last in parts[::-1]])[::-1])


def in_chunks(sequences: Sequences, part: Part, chunk: int, asked: dict[str, Any], whole: torch.Tensor) -> bool:
    """Whether the last rows, computed a few at a time, have the bits that they have among all."""
    b, first, last = part
    first = max(first, last - 3 * chunk)
    starts = range(first, last, chunk)
    pieces = [sequences.attend(paged_attention, [(b, i, min(i + chunk, last))], **asked) for i in starts]
    return equal(torch.cat(pieces), whole[len(whole) - (last - first) :])


def far(bench: Bench, kind: Kind, num_blocks: int) -> None:
    lengths, parts = [700, 40], [(0, 690, 700), (1, 39, 40)]
    near, distant = Sequences(bench, kind, lengths), Sequences(bench, kind, lengths, num_blocks)
    for name, way in {"by rows": ROWS_ALONE, "by splits": SPLITS_ALONE}.items():
        with by(way):
            found, expected = (each.attend(paged_attention, parts) for each in (distant, near))
        bench.findings.verdict(f"attention, {kind}, {num_blocks} blocks, {name}", equal(found, expected))
