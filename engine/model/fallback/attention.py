"""What transformers' modelling code calls in place of its own attention and its own mixture of experts.

transformers finds both by a name in the model's configuration; extra keyword arguments of a model's call reach them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from engine.model.interface import AttentionBackend, AttentionLayer, ForwardBatch
from kernels import ops

NAME = "octavo"


HARMLESS = {"position_ids", "cache_position", "use_cache", "output_attentions"}
"""What layers hand to an attention function and that asks for nothing but causal attention."""


class Unsuitable(Exception):
    """A class of transformers cannot be served; the text says why, without a full stop."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one layer asks of attention, once."""

    layer: int | None
    """None: it does not say which it is."""
    q: torch.Tensor
    """[T, heads, head_dim], rotated; all three with dense heads and dims"""
    k: torch.Tensor
    """[T, kv_heads, head_dim]"""
    v: torch.Tensor
    """[T, kv_heads, head_dim]"""
    scale: float | torch.Tensor
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    """fp32 [heads]"""
    is_causal: bool
    others: tuple[str, ...]
    """Names of what else it asks for, which nothing here can do."""


Step = Callable[[Asked], torch.Tensor]
"""What a model's call carries down to its layers' attention; returns [T, heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step over the KV pages."""

    batch: ForwardBatch
    attention: AttentionBackend

    def __call__(self, asked: Asked) -> torch.Tensor:
        assert asked.layer is not None
        layer = AttentionLayer(asked.layer, float(asked.scale), asked.softcap, asked.sinks)
        return self.attention.forward(layer, asked.q, asked.k, asked.v, self.batch)


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: [1, heads, T, head_dim] -> [1, T, heads, head_dim]"""
    if octavo_step is None:
        raise Unsuitable("its layers do not hand on what attention needs")
    others["attention_mask"] = attention_mask
    layer, v = getattr(module, "layer_idx", None), _rows(value)
    asked = Asked(
        layer=layer if isinstance(layer, int) else None,
        q=_rows(query).to(v.dtype),
        k=_rows(key).to(v.dtype),
        v=v,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap or None,
        sinks=None if s_aux is None else s_aux.flatten().float(),
        is_causal=is_causal is not False and getattr(module, "is_causal", True) is not False,
        others=tuple(sorted(name for name, other in others.items() if other is not None and name not in HARMLESS)),
    )
    return octavo_step(asked).view(1, asked.q.shape[0], asked.q.shape[1], v.shape[2]), None


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
