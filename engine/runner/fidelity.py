"""How far a KV cache in a smaller format moves a model's answers: tried with a text, before any request.

The text goes through the model twice, over pages in the format and over pages as the model computes. At every token the
two distributions of the next one are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.kv import LayerKV
from engine.model.base import CausalLM
from engine.runner.kv_store import KVTransforms
from engine.runner.solo import Solo

ROWS = 16
"""Tokens whose logits are held at once."""
MAX_DIVERGENCE = 0.25
"""Nats a token; beyond it answers are no longer the model's. Over 256 tokens of `engine.text.sample`, SmolLM2-135M,
Gemma 3 270M and Qwen2.5-Coder 0.5B stay below 0.1 in every format; with keys that are not fitted, Qwen's are at 0.7 and
beyond in int4, and what it then writes is nonsense."""


@dataclass(frozen=True)
class Fidelity:
    divergence: float
    """Mean Kullback-Leibler divergence from the plain cache's distribution to this one's, in nats a token."""
    agreement: float
    """Share of tokens after which both expect the same one."""
    num_tokens: int

    @property
    def is_nonsense(self) -> bool:
        """Also where numbers are not finite."""
        return not self.divergence <= MAX_DIVERGENCE

    def __str__(self) -> str:
        return (
            f"{self.divergence:.2g} nats from the plain cache's answers, the same likeliest token in "
            f"{100 * self.agreement:.0f} % of {self.num_tokens}"
        )


class Trial:
    """One text, whose plain answers are computed once."""

    def __init__(
        self, model: CausalLM, plain: Sequence[LayerKV], token_ids: Sequence[int], device: torch.device, chunk: int
    ) -> None:
        """plain: the model's layers in its own format; chunk: tokens computed at once."""
        self.model, self.token_ids, self.device, self.chunk = model, token_ids, device, chunk
        self._expected = self._hidden(plain, None)

    @torch.inference_mode()
    def measure(self, layers: Sequence[LayerKV], transforms: Sequence[KVTransforms] | None) -> Fidelity:
        """layers: the same in other formats; transforms: what is done to K and V of each layer."""
        found = self._hidden(layers, transforms)
        divergence = agreement = 0.0
        for first in range(0, len(found), ROWS):
            both = (hidden[first : first + ROWS] for hidden in (self._expected, found))
            expected, ours = (self.model.logits(hidden).float().log_softmax(dim=-1) for hidden in both)
            divergence += float((expected.exp() * (expected - ours)).sum())
            agreement += float((expected.argmax(dim=-1) == ours.argmax(dim=-1)).sum())
        return Fidelity(divergence / len(found), agreement / len(found), len(found))

    def _hidden(self, layers: Sequence[LayerKV], transforms: Sequence[KVTransforms] | None) -> torch.Tensor:
        return Solo(self.model, layers, len(self.token_ids), self.device, transforms).hidden(
            self.token_ids, chunk=self.chunk
        )
