"""flash-attn, where it is installed, as `kernels.flash` calls it: whether it is right, and how fast it is beside ours.

It reads pages of 256 tokens where release 2 must, ours have 16: each as it would be served.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu.bench import Bench, Call, check_error
from gpu.contexts import Contexts, timed_kind
from gpu.pages import Kind, Part, Sequences

from kernels import reference
from kernels.flash import FLASH_2, FLASH_3, PAGE, Flash2, Flash3, offer_2, offer_3
from kernels.registry import Refused

BF16, FP16 = torch.bfloat16, torch.float16
LARGE = {"kv_heads": 8, "head_dim": 128}
LENGTHS = [300, 1, 1025, 17, 256, 3000, 40]
CASES: list[tuple[Kind, dict[str, Any]]] = [
    (Kind(BF16, **LARGE), {}),
    (Kind(BF16, block_size=PAGE, **LARGE), {}),
    (Kind(BF16, block_size=PAGE, **LARGE), {"window": 600}),
    (Kind(FP16, group=4, head_dim=64, block_size=PAGE), {"softcap": 30.0}),
]
TINY = [(Kind(BF16, head_dim=32, kv_heads=1, block_size=size), {"window": 20}) for size in (16, PAGE)]
BESIDE = 0.95
"""Times as fast as flash-attn that ours should be where single rows read K and V."""
DECODES = [(16, 4096), (64, 4096), (256, 4096), (16, 32768)]
"""Sequences, tokens of each"""
PROMPTS = [(16, 4, 4096, 4096), (16, 1, 16384, 16384), (PAGE, 1, 32768, 512)]
"""Tokens of a page that flash-attn reads, sequences, tokens of each, rows of each"""


def run(bench: Bench) -> None:
    if bench.is_tiny:
        bench.findings.figure("flash-attn", "not asked: there is no GPU")
        return
    for name, offer in ((FLASH_3, offer_3), (FLASH_2, offer_2)):
        found = offer("cuda", BF16)
        if isinstance(found, Refused):
            bench.findings.figure(name, found.reason)
        else:
            compare(bench, name, found.function)


def compare(bench: Bench, name: str, kernel: Flash2 | Flash3) -> None:
    for kind, asked in bench.some(TINY, CASES):
        with bench.findings.case(f"{name}, {kind}"):
            check(bench, f"{name}, {kind}", kernel, kind, asked)
    for sequences, length in bench.some([(2, 20)], DECODES):
        with bench.findings.case(f"{name}, decode {sequences} x {length}"):
            decode(bench, name, kernel, sequences, length)
    for page, sequences, length, rows in bench.some([(16, 1, 20, 20), (PAGE, 1, 20, 4)], PROMPTS):
        with bench.findings.case(f"{name}, {rows} rows of {length}"):
            prompts(bench, name, kernel, page, Contexts(bench, timed_kind(bench), sequences, length, rows))


# ------------------------------------------------------------------ right
def check(bench: Bench, name: str, kernel: Flash2 | Flash3, kind: Kind, asked: dict[str, Any]) -> None:
    lengths = bench.some([17, 40, 9, 12], LENGTHS)
    sequences, words = Sequences(bench, kind, lengths), "".join(f", {word} {value}" for word, value in asked.items())
    for what, parts in {
        "single rows": [(b, n - 1, n) for b, n in enumerate(lengths)],
        "prompts": [(b, 0, n) for b, n in enumerate(lengths)],
        "all at once": mixed(lengths),
    }.items():
        own = sequences.own(parts)
        found = sequences.attend(kernel, parts, own=own, **asked)
        exact = sequences.attend(reference.paged_attention, parts, wide=True, **asked)
        plain = torch.cat([sequences.plain(part, **asked) for part in parts])
        check_error(bench.findings, f"{name}{words}, {what}", found, exact, plain)
        call = partial(sequences.attend, kernel, parts, own=own, **asked)
        bench.same_bits(f"{name}{words}, {what}", call)


def mixed(lengths: Sequence[int]) -> list[Part]:
    """Single rows first, as an engine has them; then prompts, whole and the ends of others."""
    single = [(b, n - 1, n) for b, n in enumerate(lengths[::2])]
    return single + [(b, n // 2 if b % 4 == 1 else 0, n) for b, n in enumerate(lengths) if b % 2]


# ------------------------------------------------------------------ fast
def decode(bench: Bench, name: str, kernel: Flash2 | Flash3, sequences: int, length: int) -> None:
    """As it is served, which is without dividing sums by what else is in the batch, and as it would like to."""
    contexts = Contexts(bench, timed_kind(bench), sequences, length)
    theirs = replace(contexts, kind=replace(contexts.kind, block_size=PAGE))
    what, copies, own = f"decode {sequences:4} x {length:5}", bench.copies(contexts.nbytes), theirs.own()
    ours = bench.bandwidth(f"{what}, ours", contexts.nbytes, contexts.calls(copies))
    ways = {name: kernel}
    if kernel.with_kvcache is not None:
        free = replace(kernel, with_kvcache=partial(with_splits, kernel.with_kvcache))
        ways[f"{name}, splits of its choice"] = free
    took = [
        bench.bandwidth(f"{what}, {words}", contexts.nbytes, theirs.calls(copies, partial(way, own=own)))
        for words, way in ways.items()
    ]
    bench.beside(name, ours, min(took), BESIDE)


def with_splits(with_kvcache: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return with_kvcache(*arguments, **options | {"num_splits": 0})


def prompts(bench: Bench, name: str, kernel: Call, page: int, contexts: Contexts) -> None:
    theirs = replace(contexts, kind=replace(contexts.kind, block_size=page))
    what = f"{contexts.sequences} x {contexts.rows} rows of {contexts.length}"
    ours = bench.products(f"prefill {what}, ours", contexts.operations, contexts.calls())
    calls = theirs.calls(kernel=partial(kernel, own=theirs.own()))
    bench.beside(name, ours, bench.products(f"prefill {what}, {name}", contexts.operations, calls))
