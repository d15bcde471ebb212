"""The gated feed-forward block (Shazeer 2020)."""

import torch
from torch import nn

from configs.decoder import DecoderConfig
from engine.model.layers.linear import Linear


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(config.hidden_size, {"gate": size, "up": size}, bias, dtype, gate=config.activation)
        self.down = Linear(size, {"": config.hidden_size}, bias, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.gate_up(x))
        return out
