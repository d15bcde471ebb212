"""Sequences in a poisoned KV pool, and attention over them computed the plain way."""

import math
from dataclasses import dataclass

import pytest
import torch

from configs.kv import KVFormat, KVSpec, LayerKV
from kernels import reference
from kernels.cpu import attention as native
from kernels.cpu import library
from kernels.cpu.offers import KINDS
from kernels.ops import LayerPages

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


def all_kernels():
    """The native ones and the torch reference."""
    plain = [pytest.param(t, reference.paged_attention, id=f"{kind}-reference") for t, kind in KINDS.items()]
    return [*native_kernels(), *plain]


def goes_row_by_row(kernel):
    """The torch reference does, and takes a millisecond for each: a few rows say as much of it as many."""
    return kernel is reference.paged_attention


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

    @property
    def scale(self):
        return self.spec.layers[0].head_dim ** -0.5

    def pages(self, layer=1):
        return LayerPages(self.pool, self.spec, layer)

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
        tokens = torch.arange(self.lengths[b])
        slots = self.tables[b].long()[tokens // self.spec.block_size] * self.spec.block_size
        slots += tokens % self.spec.block_size
        k, v = self.k[b] if k is None else k, self.v[b] if v is None else v
        reference.store_kv(k, v, self.pages(layer), slots)


def make_paged(lengths, *, group=3, kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spec = KVSpec((LayerKV(kv_heads, head_dim, FORMATS[dtype]),) * 2, block_size)
    counts = [spec.blocks_for_tokens(length) for length in lengths]
    pool = torch.full((sum(counts) + 3, spec.block_bytes), 0xFF, dtype=torch.uint8)  # NaN in every format
    tables = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    ids = torch.randperm(pool.shape[0], generator=generator).to(torch.int32)
    for b, count in enumerate(counts):
        tables[b, :count] = ids[sum(counts[:b]) : sum(counts[:b]) + count]

    def random(length, heads):
        return torch.randn(length, heads, head_dim, generator=generator).to(dtype)

    q = [random(length, kv_heads * group) for length in lengths]
    k, v = ([random(length, kv_heads) for length in lengths] for _ in range(2))
    paged = Paged(spec, pool, list(lengths), tables, q, k, v)
    for b in range(len(lengths)):
        paged.store(b)
    return paged


def plain_attention(q, k, v, scale, window=None, softcap=None, sinks=None):
    """Causal attention of the last rows by matmul, softmax, matmul in the inputs' dtype -> [rows, heads * dim].

    q: [rows, heads, dim]; k, v: [length, kv_heads, dim]; sinks: [heads].
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    row, token = torch.arange(k.shape[1] - q.shape[0], k.shape[1])[:, None], torch.arange(k.shape[1])
    unseen = (token > row) | (token <= row - (window or k.shape[1]))
    scores = scores.masked_fill(unseen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1).flatten(1)
