"""Sequences for timing: pools of random codes, no K and V behind them."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpu.bench import Bench, Call
from gpu.pages import Kind

from configs.kv import KVFormat
from kernels.ops import HostLengths, LayerPages, OwnRows
from kernels.triton.attention import paged_attention


@dataclass(frozen=True)
class Contexts:
    """`sequences` of `length` tokens each, of which the last `rows` ask."""

    bench: Bench
    kind: Kind
    sequences: int
    length: int
    rows: int = 1

    @property
    def nbytes(self) -> int:
        """Of K and V that are read, scales included."""
        return self.sequences * self.length * self.kind.layer.bytes_per_token()

    @property
    def operations(self) -> int:
        """Of both products, of what rows see."""
        pairs = self.sequences * sum(range(self.length - self.rows + 1, self.length + 1))
        return 4 * pairs * self.kind.kv_heads * self.kind.group * self.kind.head_dim

    @property
    def blocks(self) -> int:
        return self.sequences * self.kind.spec.blocks_for_tokens(self.length)

    def calls(self, copies: int = 1, kernel: Call = paged_attention) -> list[Call]:
        """Each on blocks of its own, scattered over one pool of two layers: what was compiled to be checked is what is
        timed."""
        spec = self.kind.spec
        made = numbers(self.bench, self.blocks * copies * spec.block_bytes).view(-1, spec.block_bytes)
        pages = LayerPages(made, spec, 1, *self.kind.transforms(self.bench.device))
        tables = torch.randperm(len(made), device=self.bench.device, generator=self.bench.generator()).to(torch.int32)
        return [self.call(pages, some, kernel) for some in tables.view(copies, self.sequences, -1)]

    def call(self, pages: LayerPages, tables: torch.Tensor, kernel: Call = paged_attention) -> Call:
        device, kind = self.bench.device, self.kind
        q = self._random(kind.kv_heads * kind.group)
        starts = torch.arange(0, len(q) + 1, self.rows, dtype=torch.int32, device=device)
        lengths = torch.full((self.sequences,), self.length, dtype=torch.int32, device=device)
        return partial(kernel, q, pages, tables, starts, lengths, kind.head_dim**-0.5)

    def own(self) -> OwnRows:
        """For kernels that read it."""
        lengths = HostLengths(*(np.full(self.sequences, number) for number in (self.rows, self.length)))
        return OwnRows(self._random(self.kind.kv_heads), self._random(self.kind.kv_heads), lengths)

    def _random(self, heads: int) -> torch.Tensor:
        return self.bench.normal(self.sequences * self.rows, heads, self.kind.head_dim, dtype=self.kind.dtype)


def timed_kind(bench: Bench, format: KVFormat = KVFormat.BF16) -> Kind:
    """Of the layer that is timed: a case of `gpu.checks.attention`, so it has been checked, and is compiled by then."""
    heads = {"kv_heads": 1, "head_dim": 32} if bench.is_tiny else {"kv_heads": 8, "head_dim": 128}
    return Kind(torch.bfloat16, (format, format), group=2, **heads)


def numbers(bench: Bench, nbytes: int) -> torch.Tensor:
    """Random bytes that mean finite numbers in every format."""
    step, made = 1 << 30, torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    for start in range(0, nbytes, step):
        made[start : start + step].random_(0, 60, generator=bench.generator(start))
    return made
