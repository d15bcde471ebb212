"""Arguments of `ops.draw`, and rows to draw from. For tests."""

import torch

OFF = (0, 1.0, 0.0)
"""No limits: (top_k, top_p, min_p)."""


def columns(
    rows: int,
    limits: list[tuple[int, float, float]],
    temperature: list[float] | None = None,
    seeds: torch.Tensor | None = None,
    choices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """What `ops.draw` wants beside logits. Limits and temperatures are repeated until there are enough; without seeds
    each row has its own."""
    top_k, top_p, min_p = zip(*(limits[row % len(limits)] for row in range(rows)), strict=True)
    temperature = temperature or [1.0]
    zeros = torch.zeros(rows, dtype=torch.int64)
    return (
        torch.tensor([temperature[row % len(temperature)] for row in range(rows)]),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.arange(rows) * 0x1234567890ABCDEF if seeds is None else seeds,
        zeros if choices is None else choices,
        zeros if positions is None else positions,
    )


def normal_logits(rows: int, vocab: int, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def apart(logits: torch.Tensor, dtype: torch.dtype = torch.float32, gap: int = 5) -> torch.Tensor:
    """The same numbers at a row stride of their own, with NaN between rows."""
    rows, vocab = logits.shape
    wide = torch.full((rows, vocab + gap), torch.nan, dtype=dtype)
    wide[:, :vocab] = logits
    return wide[:, :vocab]
