"""Attention over the pages by `kernels.ops`: one arithmetic for prefill, decode and any mixture of them."""

import torch

from configs.kv import KVLayout
from engine.model.interface import AttentionLayer, ForwardBatch
from engine.runner.kv_store import PagedStore
from kernels import flash, ops
from kernels.registry import AUTO


class PagedAttention:
    """`AttentionBackend` whose K and V are read from the pool as they are stored, also the step's own."""

    def __init__(self, store: PagedStore, layout: KVLayout, backend: str = AUTO) -> None:
        """backend: of `ops.paged_attention`."""
        self.store, self.backend = store, backend
        self._windows = tuple(layout.groups[group].window for group in store.groups)

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """q: [T, heads, head_dim], rotated; k, v: [T, kv_heads, head_dim]; returns [T, heads * head_dim]."""
        store, window = self.store, self._windows[layer.index]
        store.write(layer.index, k, v, batch)
        tables = batch.block_tables[store.groups[layer.index]]
        where = store.pages[layer.index], tables, batch.query_start, batch.seq_lens
        own = None
        if self.backend == flash.BACKEND and batch.lengths is not None:  # its pages hold k and v as they are
            own = ops.OwnRows(k, v, batch.lengths)
        how = layer.scale, window, layer.softcap, layer.sinks
        return ops.paged_attention(q, *where, *how, self.backend, own)
