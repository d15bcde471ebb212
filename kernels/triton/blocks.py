"""Copying whole blocks of a KV pool, inside it and to and from a dense buffer. Contracts: `kernels.ops`."""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from kernels.triton.device import PLAIN

WORD = torch.int64
"""What blocks are copied in; threads move two at a time."""
CHUNK = 1024
"""Words that a program copies."""


@triton.jit(do_not_specialize_on_alignment=["source_ids", "target_ids"])
def _copy(
    source: tl.tensor,
    source_ids: tl.tensor,
    target: tl.tensor,
    target_ids: tl.tensor,
    words: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Block i goes from block source_ids[i] to block target_ids[i]; without ids from, or to, block i."""
    number = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = word < words
    if source_ids is None:
        numbers = tl.load(source + number * words + word, inside, other=0)
    else:
        numbers = tl.load(source + tl.load(source_ids + number) * words + word, inside, other=0)
    if target_ids is None:
        tl.store(target + number * words + word, numbers, inside)
    else:
        tl.store(target + tl.load(target_ids + number) * words + word, numbers, inside)


def copy_blocks(pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    if not pairs:
        return
    ids = torch.tensor(pairs).T.contiguous()
    if pool.is_cuda:
        ids = ids.pin_memory().to(pool.device, non_blocking=True)  # else the host would wait for the device
    start = 0
    for count in _side_by_side(pairs):
        sources, targets = ids[:, start : start + count]
        _launch(pool, sources, pool, targets, count)
        start += count


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    _launch(pool, ids, out, None, len(ids))


def scatter_blocks(source: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
    _launch(source, None, pool, ids, len(ids))


def _side_by_side(pairs: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Lengths of runs of pairs that may be copied in any order: in a run nobody reads or writes what another writes."""
    read, written, count = set[int](), set[int](), 0
    for source, target in pairs:
        if source in written or target in written or target in read:
            yield count
            read, written, count = set(), set(), 0
        read.add(source)
        written.add(target)
        count += 1
    yield count


def _launch(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    count: int,
) -> None:
    source, target = source.view(WORD), target.view(WORD)
    words = source.shape[1]
    _copy[count, triton.cdiv(words, CHUNK)](
        source, source_ids, target, target_ids, words, CHUNK=CHUNK, num_warps=4, **PLAIN
    )
