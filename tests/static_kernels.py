"""Kernels that a device could capture, in plain torch: shapes follow from shapes alone, and no number leads to Python.

For unquantised pages. Rows without a token to see, as padded steps have them, get NaN: whoever reads one notices.
Attention is computed in fp64, and so rounds to the same numbers in whatever order it is summed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engines import threads
from packed import by_row

from kernels import ops, reference
from kernels.ops import LayerPages
from kernels.reference.attention import cap
from kernels.reference.pages import _k_view, _v_view


@contextmanager
def served() -> Iterator[None]:
    """Everything is computed by these and by the reference, linear layers row by row; by one thread, since others only
    wait for each other in numbers as few as these."""
    own: dict[str, Callable[..., Any]] = {"store_kv": store_kv, "paged_attention": paged_attention}
    with pytest.MonkeyPatch.context() as patch, threads(1):
        patch.setattr(ops, "_serve", lambda op, *where: own.get(op) or getattr(reference, op))
        patch.setattr(ops, "linear", by_row)
        patch.setattr(ops, "draw", draw, raising=False)
        yield


def store_kv(k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
    """Rows of slot -1 write once more what the first row does: real rows come first."""
    keep = slot_mapping >= 0
    slots = torch.where(keep, slot_mapping, slot_mapping[:1]).clamp(min=0)
    k, v = (torch.where(keep[:, None, None], x, x[:1]) for x in (k, v))
    block, offset = slots // pages.spec.block_size, slots % pages.spec.block_size
    k_view, v_view = _k_view(pages), _v_view(pages)
    k_view[block, :, offset] = k.unflatten(-1, k_view.shape[3:])
    pair = v_view.shape[3]
    v_view[block, :, offset // pair, offset % pair] = v


def paged_attention(
    q: torch.Tensor,
    pages: LayerPages,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    assert sinks is None
    tables = block_tables.long()
    k = _k_view(pages)[tables].flatten(4).permute(0, 1, 3, 2, 4).flatten(1, 2)  # [B, L, Hkv, D]
    v = _v_view(pages)[tables].flatten(3, 4).permute(0, 1, 3, 2, 4).flatten(1, 2)
    row = torch.arange(len(q))
    owner = (query_start[1:, None] <= row).sum(0).clamp(max=len(seq_lens) - 1)
    end = seq_lens[owner] - (query_start[1:][owner] - 1 - row)
    token = torch.arange(k.shape[1])
    seen = token < end[:, None]  # [T, L]
    if window is not None:
        seen &= token >= (end - window)[:, None]
    groups = q.shape[1] // k.shape[2]
    keys, values = (x[owner].repeat_interleave(groups, 2).double() for x in (k, v))  # [T, L, Hq, D]
    scores = cap((q.double()[:, None] * keys).sum(-1) * scale, softcap)
    weights = torch.softmax(scores.masked_fill(~seen[..., None], -torch.inf), 1)
    out = (weights[..., None] * values.masked_fill(~seen[..., None, None], 0.0)).sum(1)
    return out.to(q.dtype).flatten(1)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Stands for `kernels.ops.draw`: every argument of a row matters to its token."""
    for each in (temperature, top_k, top_p, min_p, seeds, choices, positions):
        assert each.shape == logits.shape[:1] and each.is_contiguous(), each.shape
    assert temperature.dtype == top_p.dtype == min_p.dtype == torch.float32 and top_k.dtype == torch.int32
    assert seeds.dtype == choices.dtype == positions.dtype == torch.int64
    x = logits.float()
    greedy = x.argmax(1)
    best, ranked = x.amax(1), x.sort(1, descending=True)
    weights = torch.softmax(ranked.values / temperature.clamp(min=1e-5)[:, None], 1)
    rank = torch.arange(x.shape[1])
    kept = (rank < torch.where(top_k > 0, top_k, x.shape[1])[:, None]) & (weights >= min_p[:, None] * weights[:, :1])
    kept &= weights.cumsum(1) - weights < top_p[:, None]
    key = ((seeds * 1_000_003 + choices) * 1_000_003 + positions)[:, None] * 1_000_003 + ranked.indices
    noise = -torch.log(-torch.log((torch.sin(_mixed(key).double()) * 43758.5453).frac().abs().clamp(1e-9, 1 - 1e-9)))
    scores = ranked.values / temperature.clamp(min=1e-5)[:, None] + noise
    place = scores.masked_fill(~kept, -torch.inf).argmax(1, keepdim=True)
    drawn = torch.where(temperature == 0, greedy, ranked.indices.gather(1, place)[:, 0])
    return torch.where(torch.isfinite(best), drawn, -1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Integers all over the place, below 2^20."""
    x = (x ^ (x >> 31)) * 0x2545F4914F6CDD1D
    return (x ^ (x >> 29)) & 0xFFFFF
