"""Sequences in a poisoned KV pool of a device, in the order that GPUs read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpu.bench import Bench
from paged import plain_attention, random_transforms

from configs.kv import KVFormat, KVOrder, KVSpec, LayerKV
from kernels import reference
from kernels.ops import HostLengths, KVTransform, LayerPages, OwnRows
from kernels.reference import kv_formats
from kernels.reference.pages import gather_kv

POISON = 0xFF
"""What all bytes are that hold nothing: NaN in every format that has it."""
FORMATS = {torch.float32: KVFormat.FP32, torch.bfloat16: KVFormat.BF16, torch.float16: KVFormat.FP16}


@dataclass(frozen=True)
class Kind:
    """What a layer is like, and what asks it."""

    dtype: torch.dtype = torch.bfloat16
    formats: tuple[KVFormat, KVFormat] | None = None
    """(of K, of V); None: the dtype's own"""
    group: int = 2
    kv_heads: int = 4
    head_dim: int = 64
    block_size: int = 16
    static: bool = False
    centred: bool = True

    @property
    def layer(self) -> LayerKV:
        k, v = self.formats or (FORMATS[self.dtype],) * 2
        return LayerKV(self.kv_heads, self.head_dim, k, value_format=v, static=self.static)

    @property
    def spec(self) -> KVSpec:
        return KVSpec((self.layer,) * 2, self.block_size, KVOrder.ROWS)

    def transforms(self, device: torch.device) -> tuple[KVTransform, KVTransform]:
        """As a calibration and a fit would give, but random."""
        k, v = random_transforms(self.layer, torch.Generator().manual_seed(1), self.centred)
        return on_device(k, device), on_device(v, device)

    def __str__(self) -> str:
        k, v = self.layer.formats
        formats = k.value if k is v else f"{k.value}/{v.value}"
        static = " static" if self.static else ""
        heads = f"{self.group * self.kv_heads}/{self.kv_heads}x{self.head_dim}"
        return f"{str(self.dtype).removeprefix('torch.')} on {formats}{static}, {heads}, pages of {self.block_size}"


def on_device(transform: KVTransform, device: torch.device) -> KVTransform:
    parts = transform.channels, transform.centre, transform.feedback
    return KVTransform(*(None if part is None else part.to(device) for part in parts))


Part = tuple[int, int, int]
"""(sequence, first row, row after the last)"""


class Sequences:
    """Of `lengths` tokens, all stored by the reference, in layer 1 of 2. `num_blocks`: of the pool, the last of which
    are the ones used; None: a few more than are needed."""

    def __init__(self, bench: Bench, kind: Kind, lengths: Sequence[int], num_blocks: int | None = None) -> None:
        device, spec = bench.device, kind.spec
        self.kind, self.lengths = kind, list(lengths)
        self.scale = kind.head_dim**-0.5
        counts = [spec.blocks_for_tokens(length) for length in lengths]
        used = sum(counts)
        size = num_blocks or used + 3
        pool = torch.full((size, spec.block_bytes), POISON, dtype=torch.uint8, device=device)
        self.pages = LayerPages(pool, spec, 1, *kind.transforms(device))
        ids = (size - 1 - torch.randperm(used, generator=torch.Generator().manual_seed(2))).to(torch.int32)
        tables = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
        for b, some in enumerate(ids.split(counts)):
            tables[b, : len(some)] = some
        self.tables = tables.to(device)
        shape = sum(lengths), kind.kv_heads, kind.head_dim
        k, v = (bench.normal(*shape, dtype=kind.dtype, seed=seed) for seed in (1, 2))
        queries = bench.normal(sum(lengths), kind.kv_heads * kind.group, kind.head_dim, dtype=kind.dtype, seed=3)
        self.q, self.k, self.v = (list(x.split(self.lengths)) for x in (queries, k, v))
        reference.store_kv(k, v, self.pages, torch.cat([self.slots(b) for b in range(len(lengths))]))

    def slots(self, b: int) -> torch.Tensor:
        token, size = torch.arange(self.lengths[b], device=self.tables.device), self.kind.block_size
        return self.tables[b].long()[token // size] * size + token % size

    def attend(self, kernel, parts: Sequence[Part], wide: bool = False, **asked) -> torch.Tensor:
        """Rows of each part, one after the other: [rows, heads * dims]. wide: asked for in fp32."""
        device = self.tables.device
        q = torch.cat([self.q[b][first:last] for b, first, last in parts])
        starts = torch.tensor([0, *(last - first for _, first, last in parts)]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([last for _, _, last in parts], dtype=torch.int32)
        tables = self.tables[[b for b, _, _ in parts]].contiguous()
        q = q.float() if wide else q
        return kernel(q, self.pages, tables, starts.to(device), lengths.to(device), self.scale, **asked)

    def own(self, parts: Sequence[Part]) -> OwnRows:
        """Of those rows, for kernels that read it."""
        k, v = (torch.cat([x[b][first:last] for b, first, last in parts]) for x in (self.k, self.v))
        rows, ends = np.array([last - first for _, first, last in parts]), np.array([last for _, _, last in parts])
        return OwnRows(k, v, HostLengths(rows, ends))

    def plain(self, part: Part, **asked) -> torch.Tensor:
        """By torch in the queries' number format, of what the pages mean."""
        b, first, last = part
        k, v = self._read(b, last)
        q, dtype = self.q[b][first:last], self.kind.dtype
        with q.device:  # where masks are made
            return plain_attention(q, k.to(dtype), v.to(dtype), self.scale, **asked)

    def _read(self, b: int, end: int) -> list[torch.Tensor]:
        """K, but for its centre, which softmax does not see, and V, fp32 [end, heads, dims]."""
        found = []
        pasts = gather_kv(self.pages, self.tables[b], 0, end, torch.float32)
        for past, transform, format in zip(pasts, self.pages.transforms, self.pages.kind.formats, strict=True):
            x = past.numbers if past.scales is None else past.numbers * past.scales.unsqueeze(-1)
            if self.pages.kind.is_rotated(format):
                x = kv_formats.unrotate(x)
            if transform.channels is not None:
                x = x * transform.channels.unsqueeze(1)
            found.append(x.transpose(0, 1))
        return found
