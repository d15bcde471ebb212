"""Attention over the pages by `kernels.ops`: one arithmetic for prefill, decode and any mixture of them."""

import torch

from engine.model.interface import ForwardBatch
from engine.runner.kv_store.plain import PlainStore
from kernels import ops


class PagedAttention:
    """`AttentionBackend` whose K and V are read from the pool as they are stored, also the step's own."""

    name = "paged"

    def __init__(self, store: PlainStore, scale: float) -> None:
        """`scale` multiplies q·k, usually head_dim ** -0.5."""
        self.store, self.scale = store, scale

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """q: [T, heads, head_dim], rotated; k, v: [T, kv_heads, head_dim]; returns [T, heads * head_dim]."""
        store = self.store
        store.write(layer, k, v, batch)
        return ops.paged_attention(
            q, store.pool, store.spec, layer, batch.block_tables, batch.query_start, batch.seq_lens, self.scale
        )
