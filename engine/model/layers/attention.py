"""The projections around attention; attention itself is the backend's."""

import torch
from torch import nn

from configs.decoder import DecoderConfig
from engine.model.interface import AttentionBackend, AttentionLayer, ForwardBatch
from engine.model.layers.linear import Linear
from engine.model.layers.norm import RMSNorm
from engine.model.layers.rotary import RotaryEmbedding


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query, by the number of KV heads."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = AttentionLayer(layer, config.attention_scale)
        self.heads, self.kv_heads, self.qk_norm = config.num_heads, config.num_kv_heads, config.qk_norm
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.split = [queries, keys, keys]
        self.qkv = Linear(config.hidden_size, {"q": queries, "k": keys, "v": keys}, config.qkv_bias, dtype)
        if self.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config, config.head_dim, dtype) for _ in range(2))
        self.o = Linear(queries, {"": config.hidden_size}, config.o_bias, dtype)

    def forward(
        self, x: torch.Tensor, rotary: RotaryEmbedding, batch: ForwardBatch, attention: AttentionBackend
    ) -> torch.Tensor:
        q, k, v = self.qkv(x).split(self.split, dim=-1)
        q = q.unflatten(-1, (self.heads, -1))
        k, v = k.unflatten(-1, (self.kv_heads, -1)), v.unflatten(-1, (self.kv_heads, -1))
        if self.qk_norm:
            rotary.after_norms(q, k, self.q_norm, self.k_norm, batch.positions)
        else:
            rotary(q, k, batch.positions)
        out: torch.Tensor = self.o(attention.forward(self.layer, q, k, v, batch))
        return out
