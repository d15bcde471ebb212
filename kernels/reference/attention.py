"""The KV pool and paged attention in plain torch. Contracts: `kernels.ops`; layout: `configs.kv`."""

import functools

import torch

from configs.kv import KVPart
from kernels.ops import KV_DTYPES, LayerPages

SPLIT = 256
"""Tokens whose values one matrix product sums. Over longer ones libraries divide the sum by the number of threads."""


def pool_view(pool: torch.Tensor, part: KVPart) -> torch.Tensor:
    """The numbers of one part in all blocks, [blocks, *part.shape], sharing memory with `pool`."""
    return pool[:, part.offset : part.offset + part.nbytes].view(KV_DTYPES[part.format]).view(-1, *part.shape)


def store_kv(k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
    k_part, v_part = pages.parts
    pair, block_size = k_part.format.pair, pages.spec.block_size
    keep = slot_mapping >= 0
    block, offset = slot_mapping[keep] // block_size, slot_mapping[keep] % block_size
    # the indexed dimensions come first in the result: [rows, Hkv, D / pair, pair] and [rows, Hkv, D]
    pool_view(pages.pool, k_part)[block, :, :, offset] = k[keep].reshape(-1, k.shape[1], k.shape[2] // pair, pair)
    pool_view(pages.pool, v_part)[block, :, offset // pair, :, offset % pair] = v[keep]


def gather_kv(pages: LayerPages, blocks: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the tokens [start, end): copies, fp32, [Hkv, end - start, D]. Reads no other blocks."""
    k_part, v_part = pages.parts
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
) -> torch.Tensor:
    """Row by row, so that a row's result cannot depend on what else is computed."""
    kv_heads = pages.kind.kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        if first == last:
            continue
        hidden = 0 if window is None else max(0, length - (last - 1 - first) - window)  # tokens that no row sees
        k, v = gather_kv(pages, block_tables[b], hidden, length)
        for row in range(first, last):
            end = length - (last - 1 - row)
            seen = slice(0 if window is None else max(0, end - window) - hidden, end - hidden)
            heads = q[row].float().view(kv_heads, -1, q.shape[2])  # [Hkv, G, D]
            # Copies: how a product is summed depends on strides too, and those would tell the chunk's length.
            k_seen, v_seen = k[:, seen].contiguous(), v[:, seen].contiguous()
            weights = torch.softmax(heads @ k_seen.mT * scale, dim=-1)
            parts = zip(torch.split(weights, SPLIT, -1), torch.split(v_seen, SPLIT, -2), strict=True)
            products = [w @ x for w, x in parts]
            out[row] = functools.reduce(torch.add, products).flatten(0, 1).to(q.dtype)
    return out.flatten(1)


def copy_blocks(pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    for source, destination in pairs:
        pool[destination].copy_(pool[source])
