"""From token ids to vectors, and from vectors to logits."""

import torch

from engine.model.base import Loadable
from engine.model.layers.linear import Linear
from kernels import ops


class Embedding(Loadable):
    """Rows of a table, times `scale`, which is rounded to the dtype first, as transformers does (Gemma)."""

    weight: torch.Tensor

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = torch.tensor(scale, device="cpu").to(dtype).item()
        self.register_buffer("weight", torch.empty(vocab_size, size, dtype=dtype))

    def part_shapes(self, shard: str) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load_part(self, shard: str, part: str, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, size], a fresh tensor"""
        return ops.gather_rows(self.weight, input_ids, self.scale)


class Head(Linear):
    """Vectors to logits. Packed even where tied to the embedding: a gather wants plain rows, a product does not."""

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype) -> None:
        super().__init__(size, {"": vocab_size}, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, size] -> fp32 [S, vocab_size]: rounded to bf16, the two likeliest tokens are often equal."""
        return ops.linear(x, self.packed, wide=True)

    def tie(self, embedding: Embedding) -> None:
        """Takes the embedding's table as its weight."""
        self.load_part("", "weight", embedding.weight)
