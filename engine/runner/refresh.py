"""Attention in full precision, for tokens of a sequence that is refreshed (`engine/core/refresh.py` has the rule).

    k, v ──> the sequence's own pages, in the layer's format: what later steps read
      └────> the scratch, in the model's own format ──> attention of this chunk and of those that follow it

The scratch holds one sequence, token by token from its first, in blocks like those of a pool whose table is 0, 1, 2, …
"""

import torch

from configs.kv import KVFormat, KVLayout
from configs.refresh import scratch
from engine.model.interface import AttentionLayer, ForwardBatch
from engine.runner.attention.paged import PagedAttention
from engine.runner.kv_store import allocate_pool
from kernels import ops


class RefreshAttention:
    """`AttentionBackend` for the rows of one sequence, all of whose earlier tokens have come through here as well."""

    def __init__(
        self, paged: PagedAttention, layout: KVLayout, plain: KVFormat, max_model_len: int, device: torch.device
    ) -> None:
        """paged: over the sequence's own pages; plain: the format of the model's own numbers.

        `StartupError` if the scratch does not fit.
        """
        self.paged = paged
        group = scratch(layout, plain)
        num_blocks = group.spec.blocks_for_tokens(max_model_len)
        self.pool = allocate_pool(num_blocks, group.spec.block_bytes, device)
        """uint8 [blocks, block_bytes]"""
        self._table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
        self._pages = {
            layer: (ops.LayerPages(self.pool, group.spec, index), layout.groups[layout.place(layer)[0]].window)
            for index, layer in enumerate(group.layers)
        }

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """q: [T, heads, head_dim], rotated; k, v: [T, kv_heads, head_dim]; returns [T, heads * head_dim]."""
        if layer.index not in self._pages:  # its pages are in full precision themselves
            return self.paged.forward(layer, q, k, v, batch)
        pages, window = self._pages[layer.index]
        self.paged.store.write(layer.index, k, v, batch)
        ops.store_kv(k, v, pages, batch.positions)
        where = pages, self._table, batch.query_start, batch.seq_lens
        return ops.paged_attention(q, *where, layer.scale, window, layer.softcap, layer.sinks, self.paged.backend)
