"""What the loader and an architecture agree on: checkpoint names, and modules that take their weights part by part.

    checkpoint name ── weight_map ──> module and shard ── part_shapes ──> (part, shape) ── load_part ──> packed weight

An architecture declares `weight_map` once, with `*` for the layer's number; everything else follows from its modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from configs.decoder import DecoderConfig
from engine.model.interface import AttentionBackend, ForwardBatch


class Loadable(nn.Module, ABC):
    """A module with weights. A fused one has several shards (query, key and value, say), laid side by side at load."""

    @abstractmethod
    def part_shapes(self, shard: str) -> dict[str, tuple[int, ...]]:
        """Part ("weight", "bias") -> shape in the checkpoint."""

    @abstractmethod
    def load_part(self, shard: str, part: str, tensor: torch.Tensor) -> None:
        """Takes a copy of `tensor` (any float dtype) in the module's dtype."""


@dataclass(frozen=True)
class Destination:
    """Where one tensor of the checkpoint goes."""

    module: Loadable
    shard: str
    part: str
    shape: tuple[int, ...]

    def load(self, tensor: torch.Tensor) -> None:
        self.module.load_part(self.shard, self.part, tensor)


class CausalLM(nn.Module, ABC):
    """A decoder with a language-model head, as the runner sees it."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Logits [S, vocab_size] of the rows in `batch.logit_rows`."""
        return self.logits(self.hidden(batch, attention))

    @abstractmethod
    def hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """What the head reads, [S, hidden_size], for the rows in `batch.logit_rows`: after the last norm."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head: [S, hidden_size] -> [S, vocab_size], row by row, in fp32 or the model's dtype."""


class Architecture(CausalLM):
    """One of ours. Constructed empty; `engine.model.weights.load_weights` fills it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config

    @property
    @abstractmethod
    def weight_map(self) -> Mapping[str, tuple[str, str]]:
        """Checkpoint name without its part -> (module path, shard). `*` stands for the layer's number on both sides."""

    @abstractmethod
    def tie_head(self) -> None:
        """Makes the head from the loaded embedding, for checkpoints without a head of their own."""

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name -> destination, in the order of the layers, so that fused weights complete soon."""
        found: dict[str, Destination] = {}
        layered = [name for name in self.weight_map if "*" in name]
        for name in self.weight_map:
            if name not in layered:
                found |= self._parts(name, 0)
        for layer in range(self.config.num_layers):
            for name in layered:
                found |= self._parts(name, layer)
        return found

    def _parts(self, name: str, layer: int) -> dict[str, Destination]:
        path, shard = self.weight_map[name]
        module = self.get_submodule(path.replace("*", str(layer)))
        assert isinstance(module, Loadable), path
        prefix = name.replace("*", str(layer))
        return {
            f"{prefix}.{part}": Destination(module, shard, part, shape)
            for part, shape in module.part_shapes(shard).items()
        }
