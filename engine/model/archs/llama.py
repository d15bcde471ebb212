"""The Llama family: Llama 2 and 3, SmolLM2, TinyLlama (Touvron et al. 2023), Mistral, Qwen2 and Qwen3.

    ids ─ embedding ─┬─ norm ─ qkv ─ rotary ─ attention ─ o ─┬─ norm ─ gate, up ─ silu ─ down ─┬─ … ─ norm ─ head
                     └──────────── residual ─────────────────┴──────────────────────────────────┘

The sums happen inside the next norm: `x` is what a block adds, `residual` the running sum, changed in place. Biases,
norms of queries and keys, sliding windows: as the configuration says. Other families build on these modules.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from configs.decoder import DecoderConfig
from engine.model.base import Architecture
from engine.model.interface import AttentionBackend, ForwardBatch
from engine.model.layers.attention import Attention
from engine.model.layers.embedding import Embedding, Head
from engine.model.layers.mlp import MLP
from engine.model.layers.norm import RMSNorm
from engine.model.layers.rotary import RotaryEmbedding
from kernels import ops

WEIGHTS = {
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
QK_NORMS = {
    "model.layers.*.self_attn.q_norm": ("layers.*.attention.q_norm", ""),
    "model.layers.*.self_attn.k_norm": ("layers.*.attention.k_norm", ""),
}


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config, config.hidden_size, dtype)
        self.attention = Attention(config, layer, dtype)
        self.mlp_norm = RMSNorm(config, config.hidden_size, dtype)
        self.mlp = MLP(config, dtype)

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


class Model(Architecture):
    layer_type: ClassVar[type[Layer]] = Layer

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, window: int) -> None:
        super().__init__(config)
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype, config.embedding_scale)
        self.layers = nn.ModuleList(self.layer_type(config, layer, dtype) for layer in range(config.num_layers))
        self.norm = RMSNorm(config, config.hidden_size, dtype)
        self.head = Head(config.vocab_size, config.hidden_size, dtype)
        self.rotary = RotaryEmbedding(config.rope, config.rotary_dim, config.max_position, window)
        self.local_rotary = self.rotary
        if config.local_rope is not None:
            self.local_rotary = RotaryEmbedding(config.local_rope, config.rotary_dim, config.max_position, window)

    @property
    def weight_map(self) -> Mapping[str, tuple[str, str]]:
        return WEIGHTS | QK_NORMS if self.config.qk_norm else WEIGHTS

    def tie_head(self) -> None:
        self.head.tie(self.embedding)

    def hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        x, residual = None, self.embedding(batch.input_ids)
        for layer, window in zip(self.layers, self.config.layer_windows, strict=True):
            rotary = self.rotary if window is None else self.local_rotary
            x = layer(x, residual, rotary, batch, attention)
        assert x is not None
        rows = batch.logit_rows
        return self.norm.after_add(ops.gather_rows(x, rows), ops.gather_rows(residual, rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits
