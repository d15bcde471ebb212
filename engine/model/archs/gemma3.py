"""Gemma 3, its text model (Gemma team 2025): Llama whose blocks norm what they add, too.

    ids ─ embedding x scale ─┬─ norm ─ attention ─ norm ─┬─ norm ─ gate, up ─ gelu ─ down ─ norm ─┬─ … ─ norm ─ head
                             └──────── residual ─────────┴────────────────────────────────────────┘

Most layers have a sliding window and a rotary base of their own; queries and keys are normed.
"""

from collections.abc import Mapping

import torch

from configs.decoder import DecoderConfig
from engine.model.archs import llama
from engine.model.interface import AttentionBackend, ForwardBatch
from engine.model.layers.norm import RMSNorm
from engine.model.layers.rotary import RotaryEmbedding

NORMS = {
    "model.layers.*.post_attention_layernorm": ("layers.*.attention_post_norm", ""),
    "model.layers.*.pre_feedforward_layernorm": ("layers.*.mlp_norm", ""),
    "model.layers.*.post_feedforward_layernorm": ("layers.*.mlp_post_norm", ""),
}


class Layer(llama.Layer):
    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__(config, layer, dtype)
        self.attention_post_norm = RMSNorm(config, config.hidden_size, dtype)
        self.mlp_post_norm = RMSNorm(config, config.hidden_size, dtype)

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        rotary: RotaryEmbedding,
        batch: ForwardBatch,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        x = self.attention_norm(residual) if x is None else self.attention_norm.after_add(x, residual)
        x = self.attention_post_norm(self.attention(x, rotary, batch, attention))
        out: torch.Tensor = self.mlp_post_norm(self.mlp(self.mlp_norm.after_add(x, residual)))
        return out


class Model(llama.Model):
    layer_type = Layer

    @property
    def weight_map(self) -> Mapping[str, tuple[str, str]]:
        return llama.WEIGHTS | llama.QK_NORMS | NORMS
