"""Top-k, top-p and min-p of a row that is sorted. Contract: `kernels.ops`."""

import math

import torch


def draw_truncated(
    x: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    limits = zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    kept = [truncate(x[row], weights[row], *limit) for row, limit in zip(rows.tolist(), limits, strict=True)]
    drawn = [_draw(*one, share) for one, share in zip(kept, uniform.tolist(), strict=True)]
    return torch.tensor(drawn, dtype=torch.int64)


def truncate(
    x: torch.Tensor, weights: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, weights: [W] -> tokens that stay, the most likely first, and the sums of their weights up to each."""
    order = torch.sort(x, descending=True, stable=True).indices
    order = order[x[order] > -math.inf]
    order = order[:top_k] if top_k else order
    sums = weights[order].double().cumsum(0)
    kept = len(order)
    if top_p < 1.0:
        kept = int(torch.searchsorted(sums, top_p * float(sums[-1]))) + 1
    if min_p > 0.0:
        kept = min(kept, int((x[order].double() >= math.log(min_p)).sum()))
    return order[:kept], sums[:kept]


def _draw(order: torch.Tensor, sums: torch.Tensor, uniform: float) -> int:
    return int(order[int(torch.searchsorted(sums, uniform * float(sums[-1]), right=True))])
