"""The Llama family: Llama 2 and 3, SmolLM2, TinyLlama, and Mistral within its sliding window (Touvron et al. 2023).

    ids ─ embedding ─┬─ norm ─ qkv ─ rotary ─ attention ─ o ─┬─ norm ─ gate, up ─ silu ─ down ─┬─ … ─ norm ─ head
                     └──────────── residual ─────────────────┴──────────────────────────────────┘

The sums happen inside the next norm: `x` is what a block adds, `residual` the running sum, changed in place.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from configs.model import ModelConfig
from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend, ForwardBatch
from engine.model.layers.embedding import Embedding, Head
from engine.model.layers.linear import Linear
from engine.model.layers.norm import RMSNorm
from engine.model.layers.rotary import RotaryEmbedding


class LlamaAttention(nn.Module):
    """Multi-head, grouped-query or multi-query, by the number of KV heads."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, config.num_heads, config.num_kv_heads
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.split = [queries, keys, keys]
        bias = config.attention_bias
        self.qkv = Linear(config.hidden_size, {"q": queries, "k": keys, "v": keys}, bias, dtype)
        self.o = Linear(queries, {"": config.hidden_size}, bias, dtype)

    def forward(
        self, x: torch.Tensor, rotary: RotaryEmbedding, batch: ForwardBatch, attention: AttentionBackend
    ) -> torch.Tensor:
        q, k, v = self.qkv(x).split(self.split, dim=-1)
        q = q.unflatten(-1, (self.heads, -1))
        k, v = k.unflatten(-1, (self.kv_heads, -1)), v.unflatten(-1, (self.kv_heads, -1))
        rotary(q, k, batch.positions)
        out: torch.Tensor = self.o(attention.forward(self.layer, q, k, v, batch))
        return out


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(config.hidden_size, {"gate": size, "up": size}, bias, dtype, gated=True)
        self.down = Linear(size, {"": config.hidden_size}, bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.gate_up(x))
        return out


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = LlamaAttention(config, layer, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = LlamaMLP(config, dtype)

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        rotary: RotaryEmbedding,
        batch: ForwardBatch,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """x: what the layer before adds to `residual`, None at the first; returns what this one adds. [T, hidden]"""
        x = self.attention_norm(residual) if x is None else self.attention_norm.after_add(x, residual)
        x = self.attention(x, rotary, batch, attention)
        out: torch.Tensor = self.mlp(self.mlp_norm.after_add(x, residual))
        return out


class Model(CausalLM):
    weight_map: ClassVar[Mapping[str, tuple[str, str]]] = {
        "model.embed_tokens": ("embedding", ""),
        "model.layers.*.input_layernorm": ("layers.*.attention_norm", ""),
        "model.layers.*.self_attn.q_proj": ("layers.*.attention.qkv", "q"),
        "model.layers.*.self_attn.k_proj": ("layers.*.attention.qkv", "k"),
        "model.layers.*.self_attn.v_proj": ("layers.*.attention.qkv", "v"),
        "model.layers.*.self_attn.o_proj": ("layers.*.attention.o", ""),
        "model.layers.*.post_attention_layernorm": ("layers.*.mlp_norm", ""),
        "model.layers.*.mlp.gate_proj": ("layers.*.mlp.gate_up", "gate"),
        "model.layers.*.mlp.up_proj": ("layers.*.mlp.gate_up", "up"),
        "model.layers.*.mlp.down_proj": ("layers.*.mlp.down", ""),
        "model.norm": ("norm", ""),
        "lm_head": ("head", ""),
    }

    def __init__(self, config: ModelConfig, dtype: torch.dtype, window: int) -> None:
        super().__init__(config)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(LlamaLayer(config, layer, dtype) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = Head(config.vocab_size, config.hidden_size, dtype)
        self.rotary = RotaryEmbedding(config, window)

    def tie_head(self) -> None:
        self.head.tie(self.embedding)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Logits [S, vocab_size] of the rows in `batch.logit_rows`, in the model's dtype."""
        x, residual = None, self.embedding(batch.input_ids)
        for layer in self.layers:
            x = layer(x, residual, self.rotary, batch, attention)
        assert x is not None
        rows = batch.logit_rows
        logits: torch.Tensor = self.head(self.norm.after_add(x[rows], residual[rows]))
        return logits
