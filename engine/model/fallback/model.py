"""Decoders without code of ours: transformers' own classes, with our attention, linear layers and experts in them.

    ids, positions ─ body: the class's base model, a step's tokens in one row ─ hidden states of the rows asked for
    hidden states  ─ tail: the class itself around them (head, scaling, soft caps) ─ logits

No mask is built: attention knows each row's sequence from the step that travels along. What rotates queries and keys is
fixed at load from the window that is served, as for our own families (`layers/rotary.py` says why).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from engine.model.base import CausalLM
from engine.model.fallback.attention import PackedExperts, PagedStep, Step
from engine.model.interface import AttentionBackend, ForwardBatch
from engine.model.layers.linear import Linear
from kernels import ops


class TransformersModel(CausalLM):
    """A class of transformers under `CausalLM`."""

    def __init__(self, model: Any) -> None:
        """model: a `PreTrainedModel` with a language-model head, in eval mode; it is taken apart."""
        super().__init__()
        self.body = model.base_model
        assert self.body is not model, "the class has no base model of its own"
        setattr(model, model.base_model_prefix, _Given())
        self.tail = model
        # Some look for padding tokens in every call, to warn of them; there are none, and looking waits for a GPU.
        self.body.warn_if_padding_and_no_attention_mask = _silent

    def hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        return self.run(batch.input_ids, batch.positions, PagedStep(batch, attention))[batch.logit_rows]

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """int64 [T] each -> [T, hidden]"""
        out = self.body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, octavo_step=step)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.tail(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def _silent(*_: Any) -> None:
    pass


@dataclass
class _Answer(MoeModelOutputWithPast):
    """Every part that some class looks for in its base model's answer."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


class _Given(nn.Module):
    """In the place of a base model whose answer is there already."""

    @property
    def decoder(self) -> "_Given":
        """Some classes call a part of their base model by this name (OPT)."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Answer:
        return _Answer(last_hidden_state=inputs_embeds)


class RowLinear(Linear):
    """`Linear` for inputs of any number of dims, made from a loaded layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out, in]; bias: [out]"""
        with torch.device(weight.device):
            super().__init__(weight.shape[1], {"": weight.shape[0]}, bias is not None, weight.dtype)
        for part, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                self.load_part("", part, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return super().forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.out_features)


class RowWeight(torch.Tensor):
    """A weight in a module that multiplies by it itself (`functional.linear`), as routers of experts do: those products
    are ours, so that a row does not depend on its company. Everything else is torch's."""

    packed: ops.PackedLinear

    @classmethod
    def of(cls, weight: torch.Tensor | None) -> "RowWeight":
        """weight: [out, in]"""
        assert weight is not None
        made: RowWeight = torch.Tensor._make_subclass(cls, weight.detach())
        made.packed = ops.pack_linear(weight.detach().contiguous())
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        if function is functional.linear and len(arguments) > 1 and isinstance(arguments[1], RowWeight):
            x, weight, bias = (*arguments, options.get("bias"))[:3]
            if x.dtype == weight.dtype:
                rows = ops.linear(x.reshape(-1, x.shape[-1]), weight.packed).view(*x.shape[:-1], -1)
                return rows if bias is None else rows + bias
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **options)


def replace_layers(model: nn.Module, progress: Callable[[float], None]) -> None:
    """Puts our linear layers and experts in place of a loaded model's own: each old one goes before the next comes.
    `progress` gets the fraction done."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, Conv1D) or is_experts(child) or _is_router(child)
    ]
    for number, (parent, name) in enumerate(found, 1):
        child = parent.get_submodule(name)
        if isinstance(child, nn.Linear):
            setattr(parent, name, RowLinear(child.weight, child.bias))
        elif isinstance(child, Conv1D):  # GPT-2's linear layer, its weight transposed
            setattr(parent, name, RowLinear(child.weight.T, child.bias))
        elif is_experts(child):
            child.packed_experts = PackedExperts(child)  # type: ignore[assignment]
        else:
            weight = RowWeight.of(child._parameters["weight"])
            del child.weight
            child.weight = weight
        progress(number / len(found))


def _is_router(module: nn.Module) -> bool:
    """A leaf with a matrix of its own that is neither a table nor one of torch's layers."""
    weight = module._parameters.get("weight")
    is_torchs = type(module).__module__.startswith("torch.") or isinstance(module, nn.Linear | nn.Embedding)
    return weight is not None and weight.dim() == 2 and not is_torchs and not any(module.children())


def is_experts(module: nn.Module) -> bool:
    """Of a class under transformers' `use_experts_implementation`."""
    return hasattr(module, "is_concatenated")


def fix_rope(model: nn.Module, window: int) -> None:
    """Sets the frequencies that transformers would choose for a text of `window` tokens, for good.

    Its `dynamic` and `longrope` look at the longest position of each call, so that company would change an answer and
    cached keys would go stale.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            _fix(module, "", kinds, window)
            module.rope_type = "default"
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                _fix(module, layer_type, kind, window)
            module.rope_type = dict.fromkeys(kinds, "default")


def _fix(module: Any, layer_type: str, kind: str, window: int) -> None:
    if "dynamic" not in kind and kind != "longrope":
        return
    prefix, options = (f"{layer_type}_", {"layer_type": layer_type}) if layer_type else ("", {})
    device = getattr(module, f"{prefix}inv_freq").device
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=window, **options)
    setattr(module, f"{prefix}inv_freq", frequencies)
    setattr(module, f"{prefix}attention_scaling", scale)
