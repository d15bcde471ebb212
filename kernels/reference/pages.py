"""Writing and reading the KV pool in plain torch. Contracts: `kernels.ops`; layout: `configs.kv`; what stored numbers
mean: `kernels.reference.kv_formats`."""

from dataclasses import dataclass

import torch

from configs.kv import KVFormat, KVOrder, KVPart
from kernels.ops import LayerPages
from kernels.reference import kv_formats


@dataclass(frozen=True)
class Past:
    """K or V of consecutive tokens."""

    numbers: torch.Tensor
    """fp32 [Hkv, L, D]"""
    scales: torch.Tensor | None = None
    """fp32 [Hkv, L]: what each token's numbers are still to be multiplied by; None: nothing"""

    def slice(self, start: int, end: int) -> "Past":
        # Copies: how a product is summed depends on strides too, and those would tell the chunk's length.
        numbers = self.numbers[:, start:end].contiguous()
        return Past(numbers, None if self.scales is None else self.scales[:, start:end])

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """x: scores or weights of the tokens, [Hkv, ..., L]."""
        if self.scales is None:
            return x
        heads, tokens = self.scales.shape
        return x * self.scales.view(heads, *[1] * (x.dim() - 2), tokens)


def pool_view(pool: torch.Tensor, part: KVPart) -> torch.Tensor:
    """The numbers of one part in all blocks, [blocks, *part.shape], sharing memory with `pool`."""
    return pool[:, part.offset : part.offset + part.nbytes].view(getattr(torch, part.dtype)).view(-1, *part.shape)


def store_kv(k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
    keep = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[keep]
    block, offset = slots // pages.spec.block_size, slots % pages.spec.block_size
    codes = []
    for half, x, transform in zip(pages.halves, (k, v), pages.transforms, strict=True):
        encoded = kv_formats.encode(x[keep], pages.kind, half.format, transform)
        codes.append(kv_formats.raw(encoded.codes))
        for part, numbers in ((half.scales, encoded.scales), (half.zeros, encoded.zeros)):
            if part is not None and numbers is not None:
                pool_view(pages.pool, part)[block, :, :, offset] = numbers  # rows come first: [rows, Hkv, groups]
    _put_k(codes[0], pages, block, offset)
    _put_v(codes[1], pages, block, offset)


def _put_k(codes: torch.Tensor, pages: LayerPages, block: torch.Tensor, offset: torch.Tensor) -> None:
    if pages.halves[0].format is KVFormat.INT4:
        codes = kv_formats.pack_k(codes)
    view = _k_view(pages)
    view[block, :, offset] = codes.view(*codes.shape[:-1], *view.shape[3:])


def _put_v(codes: torch.Tensor, pages: LayerPages, block: torch.Tensor, offset: torch.Tensor) -> None:
    if pages.halves[1].format is KVFormat.INT4:
        codes = kv_formats.pack_v(codes)
    view = _v_view(pages)
    pair = view.shape[3]
    view[block, :, offset // pair, offset % pair] = codes


def gather_kv(pages: LayerPages, blocks: torch.Tensor, start: int, end: int, dtype: torch.dtype) -> tuple[Past, Past]:
    """K and V of the tokens [start, end), still rotated and divided by their channels: copies. Reads no other blocks.

    dtype: in which attention computes; what int4 reads as is rounded to it.
    """
    k_half, v_half = pages.halves
    first = start // pages.spec.block_size
    index = blocks[first : pages.spec.blocks_for_tokens(end)].long()
    tokens = slice(start - first * pages.spec.block_size, end - first * pages.spec.block_size)
    k = _k_view(pages)[index].transpose(0, 1).flatten(3).flatten(1, 2)[:, tokens]
    v = _v_view(pages)[index].transpose(0, 1).flatten(1, 3)[:, tokens]
    if k_half.format is KVFormat.INT4:
        k = kv_formats.unpack_k(k)
    if v_half.format is KVFormat.INT4:
        v = kv_formats.unpack_v(v)
    pasts = []
    for half, codes in ((k_half, k), (v_half, v)):
        scales, zeros = (
            None if part is None else pool_view(pages.pool, part)[index].permute(1, 0, 3, 2).flatten(1, 2)[:, tokens]
            for part in (half.scales, half.zeros)
        )  # [Hkv, tokens, groups]
        if scales is not None and zeros is not None:
            pasts.append(Past(kv_formats.decode_int4(codes, scales, zeros).to(dtype).float()))
        else:
            numbers = codes.view(getattr(torch, half.codes.dtype)).float()
            pasts.append(Past(numbers, None if scales is None else scales.squeeze(2).float()))
    return pasts[0], pasts[1]


def copy_blocks(pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    for source, destination in pairs:
        pool[destination].copy_(pool[source])


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    torch.index_select(pool, 0, ids, out=out)


def scatter_blocks(source: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
    pool.index_copy_(0, ids, source)


def _k_view(pages: LayerPages) -> torch.Tensor:
    """[blocks, Hkv, block size, D / pair, pair]; int4: D / 2 bytes, pair 1."""
    half, spec, heads = pages.halves[0], pages.spec, pages.kind.kv_heads
    view, pair = kv_formats.raw(pool_view(pages.pool, half.codes)), spec.pair(half.format)
    if spec.order is KVOrder.ROWS:
        return view.unsqueeze(-1)
    return view.view(len(view), heads, -1, spec.block_size, pair).transpose(2, 3)


def _v_view(pages: LayerPages) -> torch.Tensor:
    """[blocks, Hkv, block size / pair, pair, D]; int4: D / 2 bytes, pair 1."""
    half, spec, heads = pages.halves[1], pages.spec, pages.kind.kv_heads
    view, pair = kv_formats.raw(pool_view(pages.pool, half.codes)), spec.pair(half.format)
    return view.view(len(view), heads, spec.block_size // pair, -1, pair).transpose(3, 4)
