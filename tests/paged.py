"""Sequences in a poisoned KV pool, what its bytes mean, and attention over them computed the plain way."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from configs.kv import KVFormat, KVOrder, KVSpec, LayerKV
from kernels import ops, reference
from kernels.cpu import attention as native
from kernels.cpu import library
from kernels.cpu.offers import KINDS
from kernels.ops import KVTransform, LayerPages
from kernels.reference import kv_formats

once_for_all_kernels = functools.lru_cache(maxsize=4)
"""For what tests of one kernel after the other compare with: slow to compute, and not to be changed."""

FORMATS = {torch.float32: KVFormat.FP32, torch.bfloat16: KVFormat.BF16, torch.float16: KVFormat.FP16}


def native_kernels():
    """pytest parameters (dtype, paged_attention), one for each instruction set that this machine can run."""
    found = library.load()
    if found is None:
        return [pytest.param(None, None, marks=pytest.mark.skip(reason=str(library.refusal())))]
    return [
        pytest.param(dtype, native.native_attention(found, f"{KINDS[dtype]}_{isa}"), id=f"{KINDS[dtype]}-{isa}")
        for dtype, isas in native.ISAS.items()
        for isa in isas
        if found.refusal(f"attention_{KINDS[dtype]}", isa) is None
    ]


def kernels_for(formats):
    """Those of `all_kernels` that read pages in `formats` (K's, V's)."""
    return [
        param
        for param in all_kernels()
        if goes_row_by_row(param.values[1])
        or (param.values[0] and ops.compute_dtype(param.values[0], formats) in param.values[1].entries)
    ]


def all_kernels():
    """The native ones and the torch reference."""
    plain = [pytest.param(t, reference.paged_attention, id=f"{kind}-reference") for t, kind in KINDS.items()]
    return [*native_kernels(), *plain]


def goes_row_by_row(kernel):
    """The torch reference does, and takes a millisecond for each: a few rows say as much of it as many."""
    return kernel is reference.paged_attention


def few(kernel, parts, rows=3):
    """The last `rows` of each part for a kernel that goes row by row, for others all of them."""
    return [(b, max(first, n - rows), n) for b, first, n in parts] if goes_row_by_row(kernel) else parts


@dataclass
class Paged:
    """Sequences of `lengths` tokens; all of them stored. Everything else in the pool is NaN."""

    spec: KVSpec
    pool: torch.Tensor
    lengths: list[int]
    tables: torch.Tensor
    """int32 [B, max_blocks]; entries past a sequence's end are no block ids."""
    q: list[torch.Tensor]
    """[length, heads, head_dim] for each sequence"""
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    transforms: tuple[KVTransform, KVTransform] = (KVTransform(), KVTransform())

    @property
    def scale(self):
        return self.spec.layers[0].head_dim ** -0.5

    def pages(self, layer=1):
        return LayerPages(self.pool, self.spec, layer, *self.transforms)

    def read(self, b, layer=1):
        """K and V of sequence b as its bytes mean them, fp64 [length, kv_heads, head_dim]."""
        blocks = self.tables[b, : self.spec.blocks_for_tokens(self.lengths[b])].long()
        return [meaning(self.pages(layer), half, blocks)[: self.lengths[b]] for half in (0, 1)]

    def attend(self, kernel, parts, layer=1, window=None, softcap=None, sinks=None):
        """Rows [first, last) of sequence b for each (b, first, last), in one call -> list of [rows, heads * dim]"""
        b = [part[0] for part in parts]
        rows = [last - first for _, first, last in parts]
        q = torch.cat([self.q[b][first:last] for b, first, last in parts])
        starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([last for _, _, last in parts], dtype=torch.int32)
        where = self.pages(layer), self.tables[b].contiguous(), starts, lengths
        out = kernel(q, *where, self.scale, window, softcap, sinks)
        return list(out.split(rows))

    def whole(self, kernel, b, layer=1):
        return self.attend(kernel, [(b, 0, self.lengths[b])], layer)[0]

    def store(self, b, k=None, v=None, layer=1):
        """Writes K and V of sequence b, its own unless given."""
        k, v = self.k[b] if k is None else k, self.v[b] if v is None else v
        reference.store_kv(k, v, self.pages(layer), self.slots(b))

    def slots(self, b):
        """Of the tokens of sequence b, int64 [length]"""
        tokens = torch.arange(self.lengths[b])
        return self.tables[b].long()[tokens // self.spec.block_size] * self.spec.block_size + (
            tokens % self.spec.block_size
        )


def meaning(pages, which, blocks):
    """K (0) or V (1) of the tokens of `blocks` as layout and formats are defined, fp64 [tokens, kv_heads, dim]."""
    kind, half, size = pages.kind, pages.halves[which], pages.spec.block_size

    def numbers(part):
        raw = pages.pool[blocks, part.offset : part.offset + part.nbytes].contiguous()
        return raw.view(getattr(torch, part.dtype)).view(len(blocks), *part.shape)

    codes = numbers(half.codes)
    if half.format is KVFormat.INT4:
        x = codes.new_empty(len(blocks), size, kind.kv_heads, kind.head_dim)
        for dim in range(kind.head_dim):
            byte = dim // 2 if which == 0 else dim // 32 * 16 + dim % 16
            high = dim % 2 if which == 0 else dim % 32 // 16
            at = codes[:, :, byte].transpose(1, 2) if which == 0 else codes[:, :, :, byte].transpose(1, 2)
            x[..., dim] = at >> 4 if high else at & 15
    elif which == 0:
        x = codes.permute(0, 3, 1, 2, 4).flatten(3)
    else:
        x = codes.permute(0, 2, 4, 1, 3).flatten(1, 2)
    x = x.double().reshape(len(blocks) * size, kind.kv_heads, kind.head_dim)
    if half.scales is not None:
        scales = numbers(half.scales).double().permute(0, 3, 1, 2).flatten(0, 1)
        groups = x.view(*scales.shape, -1) * scales[..., None]
        if half.zeros is not None:
            groups += numbers(half.zeros).double().permute(0, 3, 1, 2).flatten(0, 1)[..., None]
        x = groups.flatten(2)
    if kind.is_rotated(half.format):
        x = x @ rotation(kind.head_dim)
    return untransformed(x, pages.transforms[which])


def untransformed(x, transform):
    """x: [tokens, kv_heads, dim]"""
    if transform.channels is not None:
        x = x * transform.channels.to(x.dtype)
    return x if transform.centre is None else x + transform.centre.to(x.dtype)


def random_transforms(kind, generator, centred=True):
    """What static scales and fitted keys bring: (of K, of V). Scores that are bent must not be of centred keys."""

    def random(*size):
        return torch.rand(kind.kv_heads, kind.head_dim, *size, generator=generator)

    found = []
    for which, form in enumerate(kind.formats):
        if kind.static and form.may_be_static:
            found.append(KVTransform((random() + 0.5) / (20 if form is KVFormat.INT8 else 1)))
        elif which == 0 and kind.num_scales(form):
            centre, feedback = random() - 0.5, (random(kind.head_dim) - 0.5) / 4
            found.append(KVTransform(random() + 0.5, centre if centred else None, feedback))
        else:
            found.append(KVTransform())
    return found[0], found[1]


def rotation(dims):
    """fp64 [dims, dims]: what is stored is `rotation(dims) @ x`, and this is orthogonal."""
    one = torch.ones(1, 1, dtype=torch.float64)
    while dims % (2 * len(one)) == 0:
        one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
    blocks = torch.block_diag(*[one] * (dims // len(one))) / math.sqrt(len(one))
    return blocks * kv_formats.signs(dims, torch.device("cpu")).double()


def make_paged(lengths: Sequence[int], **options: Any) -> Paged:
    """A copy of what `_made` makes, which tests may change: several ask for the same."""
    made = _made(tuple(lengths), **options)
    tensors = {name: [x.clone() for x in getattr(made, name)] for name in "qkv"}
    return replace(made, pool=made.pool.clone(), tables=made.tables.clone(), lengths=list(lengths), **tensors)


@functools.lru_cache(maxsize=64)
def _made(
    lengths: tuple[int, ...],
    *,
    group=3,
    kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=torch.bfloat16,
    seed=0,
    formats=None,
    static=False,
    centred=True,
    poison=0xFF,
    shuffled=True,
    order=KVOrder.PAIRED,
):
    """formats: (of K, of V), the dtype's own unless given; poison: what all bytes are that hold nothing."""
    generator = torch.Generator().manual_seed(seed)
    k_format, v_format = formats or (FORMATS[dtype],) * 2
    kind = LayerKV(kv_heads, head_dim, k_format, value_format=v_format, static=static)
    spec = KVSpec((kind,) * 2, block_size, order)
    counts = [spec.blocks_for_tokens(length) for length in lengths]
    pool = torch.full((sum(counts) + 3, spec.block_bytes), poison, dtype=torch.uint8)
    tables = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    ids = torch.randperm(pool.shape[0], generator=generator) if shuffled else torch.arange(pool.shape[0])
    ids = ids.to(torch.int32)
    for b, count in enumerate(counts):
        tables[b, :count] = ids[sum(counts[:b]) : sum(counts[:b]) + count]

    def random(length, heads):
        return torch.randn(length, heads, head_dim, generator=generator).to(dtype)

    q = [random(length, kv_heads * group) for length in lengths]
    k, v = ([random(length, kv_heads) for length in lengths] for _ in range(2))
    paged = Paged(spec, pool, list(lengths), tables, q, k, v, random_transforms(kind, generator, centred))
    slots = torch.cat([paged.slots(b) for b in range(len(lengths))])
    reference.store_kv(torch.cat(k), torch.cat(v), paged.pages(), slots)
    return paged


def plain_attention(q, k, v, scale, window=None, softcap=None, sinks=None):
    """Causal attention of the last rows by matmul, softmax, matmul in the inputs' dtype -> [rows, heads * dim].

    q: [rows, heads, dim]; k, v: [length, kv_heads, dim]; sinks: [heads].
    """
    (rows, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    q = q.transpose(0, 1).reshape(kv_heads, -1, dim)  # the rows of all heads that read the same keys
    scores = (q @ k.permute(1, 2, 0) * scale).view(heads, rows, length)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row, token = torch.arange(length - rows, length)[:, None], torch.arange(length)
    unseen = (token > row) | (token <= row - (window or length))
    scores = scores.masked_fill(unseen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, rows, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    out = weights.reshape(kv_heads, -1, length) @ v.transpose(0, 1)
    return out.view(heads, rows, dim).transpose(0, 1).flatten(1)
