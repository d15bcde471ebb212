"""Whole blocks copied in Triton: inside a pool, to and from a dense buffer, beyond 4 GiB too."""

import torch
from gpu.bench import Bench, equal, poisoned

from kernels.reference import pages as reference
from kernels.triton import blocks

CASES = [
    (64, 4096), (64, 360 << 10), (64, 1792 << 10), (2000, 64 << 10), (33000, 128 << 10), (257, 20480), (9, 4 << 20),
]  # fmt: skip
"""Blocks, bytes of each. The fifth is 4.2 GB: bytes, and numbers of two bytes, past what 32 bits count."""


def run(bench: Bench) -> None:
    with poisoned():
        for number, nbytes in bench.some([(9, 4096)], CASES):
            with bench.findings.case(f"{number} blocks of {nbytes} bytes"):
                check(bench, number, nbytes)


def check(bench: Bench, number: int, nbytes: int) -> None:
    findings, name = bench.findings, f"{number} blocks of {nbytes >> 10} KiB"
    pool = torch.empty(number, nbytes, dtype=torch.uint8, device=bench.device)
    pool.random_(generator=bench.generator())
    last = number - 1
    pairs = {
        "apart": [(0, last), (1, last - 1), (2, last - 2)],
        "in a chain": [(0, last), (last, 3), (3, 4), (1, last), (5, 5)],
        "a swap": [(0, 5), (1, 0), (5, 1)],
    }
    for words, some in pairs.items():
        touched = sorted({block for pair in some for block in pair})
        before, expected = pool[touched].clone(), pool[touched].clone()
        at = {block: place for place, block in enumerate(touched)}
        reference.copy_blocks(expected, [(at[source], at[target]) for source, target in some])

        def copied(some=some, touched=touched, before=before) -> torch.Tensor:
            pool[touched] = before
            blocks.copy_blocks(pool, some)
            return pool[touched]

        findings.verdict(f"copy_blocks, {name}, {words}", equal(copied(), expected))
        bench.same_bits(f"copy_blocks, {name}, {words}", copied)
    some = torch.randperm(last, generator=torch.Generator().manual_seed(1))[: min(200, number // 2)]
    some[0] = last
    some = some.to(bench.device)

    def gathered() -> torch.Tensor:
        dense = torch.empty(len(some), nbytes, dtype=torch.uint8, device=bench.device)
        blocks.gather_blocks(pool, some, dense)
        return dense

    def scattered() -> torch.Tensor:
        pool[some] = 0
        blocks.scatter_blocks(dense, some, pool)
        return pool[some]

    dense, expected = gathered(), pool.clone()
    findings.verdict(f"gather_blocks, {name}", equal(dense, expected[some]))
    bench.same_bits(f"gather_blocks, {name}", gathered)
    dense = expected[some] = dense.flip(1)
    blocks.scatter_blocks(dense, some, pool)
    findings.verdict(f"scatter_blocks, {name}", equal(pool, expected))
    bench.same_bits(f"scatter_blocks, {name}", scattered)
