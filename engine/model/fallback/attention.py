"""What transformers' modelling code calls in place of its own attention and its own mixture of experts.

transformers finds both by a name in the model's configuration; extra keyword arguments of a model's call reach them.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from engine.model.interface import AttentionBackend, ForwardBatch
from kernels import ops

NAME = "octavo"


class Step(Protocol):
    """What a model's call carries down to its attention layers."""

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | torch.Tensor,
        others: dict[str, Any],
    ) -> torch.Tensor:
        """q: [T, heads, head_dim]; k, v: [T, kv_heads, head_dim], rotated; others: what else the layer asks for, None
        left out (`asked_of_softmax`). Returns [T, heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step over the KV pages."""

    batch: ForwardBatch
    attention: AttentionBackend

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | torch.Tensor,
        others: dict[str, Any],
    ) -> torch.Tensor:
        layer = module.layer_idx
        assert isinstance(layer, int)
        asked = asked_of_softmax(others)
        return self.attention.forward(layer, q.to(v.dtype), k.to(v.dtype), v, self.batch, float(scale), *asked)


def asked_of_softmax(others: dict[str, Any]) -> tuple[float | None, torch.Tensor | None]:
    """(softcap, sinks fp32 [heads]), by the names that transformers has for them."""
    sinks = others.get("s_aux")
    return others.get("softcap") or None, None if sinks is None else sinks.flatten().float()


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | torch.Tensor | None = None,
    dropout: float = 0.0,
    *,
    octavo_step: Step | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: [1, heads, T, head_dim] -> [1, T, heads, head_dim]"""
    if octavo_step is None:
        raise TypeError("its layers do not pass on what attention is given")
    if attention_mask is not None:
        others["attention_mask"] = attention_mask
    asked = {key: other for key, other in others.items() if other is not None}
    q, k, v = _rows(query), _rows(key), _rows(value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = octavo_step.attend(module, q, k, v, scale, asked)
    return out.view(1, q.shape[0], q.shape[1], v.shape[2]), None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, D] -> [T, heads, D], heads and dims dense"""
    rows = x[0].transpose(0, 1)
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


# ------------------------------------------------------------------ mixtures of experts
class PackedExperts:
    """The experts of one layer, each two linear layers whose rows do not depend on company."""

    def __init__(self, module: Any) -> None:
        """module: a class under transformers' `use_experts_implementation`, with weights [experts, ., .]."""
        self.first = self._pack(module, "gate_up_proj" if module.has_gate else "up_proj")
        self.second = self._pack(module, "down_proj")

    @staticmethod
    def _pack(module: Any, name: str) -> list[ops.PackedLinear]:
        """Takes the weights out of the module, so that they are not kept twice."""
        weights, biases = getattr(module, name), getattr(module, f"{name}_bias", None) if module.has_bias else None
        packed = []
        for expert in range(len(weights)):
            weight = weights[expert].T if module.is_transposed else weights[expert]
            packed.append(ops.pack_linear(weight.contiguous(), None if biases is None else biases[expert].contiguous()))
        setattr(module, name, None)
        return packed


def run_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts function (its `ExpertsInterface`).

    hidden_states: [T, hidden]; top_k_index, top_k_weights: [T, k]. Each row is the weighted sum of its experts' answers
    in the order of its choices, whatever the other rows choose.
    """
    tokens, chosen = top_k_index.shape
    answers = hidden_states.new_empty(tokens * chosen, hidden_states.shape[1])
    if not answers.is_meta:
        experts: PackedExperts = module.packed_experts
        flat = top_k_index.flatten()
        for expert in torch.unique(flat).tolist():
            places = (flat == expert).nonzero()[:, 0]
            inner = ops.linear(hidden_states[places // chosen], experts.first[expert])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            answer = ops.linear(inner.contiguous(), experts.second[expert])
            answers[places] = module.post_expert_norm(answer) if module.has_post_expert_norm else answer
    weighted = answers.view(tokens, chosen, -1) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


AttentionInterface.register(NAME, attend)
ExpertsInterface.register(NAME, run_experts)
