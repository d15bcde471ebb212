"""The KV pool and paged attention in plain torch. Contracts: `kernels.ops`; layout: `configs.kv`."""

import functools

import torch

from configs.kv import KVPart
from kernels.ops import LayerPages

SPLIT = 256
"""Tokens whose values one matrix product sums. Over longer ones libraries divide the sum by the number of threads."""

SCORES = 2**24
"""Numbers q . k worked on at a time where rows go together: 64 MiB in fp32, and a few times that for what is made of
them. `configs.pool` reckons with it."""


def pool_view(pool: torch.Tensor, part: KVPart) -> torch.Tensor:
    """The numbers of one part in all blocks, [blocks, *part.shape], sharing memory with `pool`."""
    return pool[:, part.offset : part.offset + part.nbytes].view(getattr(torch, part.dtype)).view(-1, *part.shape)


def store_kv(k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
    k_part, v_part = (half.codes for half in pages.halves)
    pair, block_size = pages.kind.format.pair, pages.spec.block_size
    keep = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[keep]
    block, offset = slots // block_size, slots % block_size
    # the indexed dimensions come first in the result: [rows, Hkv, D / pair, pair] and [rows, Hkv, D]
    pool_view(pages.pool, k_part)[block, :, :, offset] = k[keep].reshape(-1, k.shape[1], k.shape[2] // pair, pair)
    pool_view(pages.pool, v_part)[block, :, offset // pair, :, offset % pair] = v[keep]


def gather_kv(pages: LayerPages, blocks: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the tokens [start, end): copies, fp32, [Hkv, end - start, D]. Reads no other blocks."""
    k_part, v_part = (half.codes for half in pages.halves)
    first = start // pages.spec.block_size
    index = blocks[first : pages.spec.blocks_for_tokens(end)].long()
    tokens = slice(start - first * pages.spec.block_size, end - first * pages.spec.block_size)
    k = pool_view(pages.pool, k_part)[index].permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
    v = pool_view(pages.pool, v_part)[index].permute(1, 0, 2, 4, 3).flatten(1, 3)
    return k[:, tokens].float(), v[:, tokens].float()


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
    """Sequence by sequence. On the CPU also row by row, so that a row's result cannot depend on what else is computed;
    elsewhere nobody claims that, and a launch for each row would take longer than all the arithmetic."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    attend = attend_alone if q.is_cpu else attend_together
    ends = torch.cat((query_start, seq_lens)).tolist()  # one transfer
    starts, lengths = ends[: len(query_start)], ends[len(query_start) :]
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        if first == last:
            continue
        hidden = 0 if window is None else max(0, length - (last - 1 - first) - window)  # tokens that no row sees
        k, v = gather_kv(pages, block_tables[b], hidden, length)
        attend(q[first:last], k, v, scale, window, softcap, sinks, out[first:last])
    return out.flatten(1)


def attend_alone(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Rows q [n, Hq, D], the last n of the tokens of k and v [Hkv, L, D], each by itself, into out [n, Hq, D]."""
    rows, tokens = q.shape[0], k.shape[1]
    for row in range(rows):
        end = tokens - rows + row + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        heads = q[row].float().view(k.shape[0], -1, q.shape[2])  # [Hkv, G, D]
        # Copies: how a product is summed depends on strides too, and those would tell the chunk's length.
        k_seen, v_seen = k[:, seen].contiguous(), v[:, seen].contiguous()
        weights = softmax(cap(heads @ k_seen.mT * scale, softcap), sinks)
        parts = zip(torch.split(weights, SPLIT, -1), torch.split(v_seen, SPLIT, -2), strict=True)
        products = [w @ x for w, x in parts]
        out[row] = functools.reduce(torch.add, products).flatten(0, 1).to(q.dtype)


def attend_together(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The same with as many rows in a product as `SCORES` allows, and a mask for what each of them does not see."""
    (rows, heads, dims), (kv_heads, tokens, _) = q.shape, k.shape
    token = torch.arange(tokens, device=q.device)
    step = max(1, SCORES // (heads * tokens))
    for first in range(0, rows, step):
        some = q[first : first + step]
        n = some.shape[0]
        end = torch.arange(tokens - rows + first + 1, tokens - rows + first + 1 + n, device=q.device)[:, None]
        unseen = token >= end  # [n, L]
        if window is not None:
            unseen |= token < end - window
        grouped = some.float().view(n, kv_heads, -1, dims).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        scores = cap((grouped.flatten(1, 2) @ k.mT).mul_(scale), softcap).view(kv_heads, -1, n, tokens)
        weights = softmax(scores.masked_fill_(unseen, -torch.inf), sinks)
        products = (weights.flatten(1, 2) @ v).view(kv_heads, -1, n, dims)
        out[first : first + step] = products.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """In place."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of scores [Hkv, G, ..., L]; sinks [Hq], one for each head, take their share."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    one_each = sinks.view(*scores.shape[:2], *[1] * (scores.dim() - 2)).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, one_each), dim=-1), dim=-1)[..., :-1]


def copy_blocks(pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    for source, destination in pairs:
        pool[destination].copy_(pool[source])
