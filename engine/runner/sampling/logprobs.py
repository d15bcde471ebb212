"""Log-probabilities of the model's own distribution: raw logits, before bias, masks, penalties and temperature."""

import numpy as np
import torch

from engine.messages import TokenLogprobs
from engine.runner.sampling.distribution import F32, Ids, largest
from kernels import ops

MINUS_INFINITY = -9999.0
"""What stands for it: JSON has no infinities."""


def token_logprobs(x: torch.Tensor, work: torch.Tensor, token_ids: Ids, num_top: Ids) -> list[TokenLogprobs]:
    """x: fp32 [R, width] raw logits, each row's maximum finite; work: two of its size; num_top: [R], of each row."""
    maximum = x.amax(dim=1).numpy()
    sums = ops.softmax_weights(x, torch.ones(len(x)), work[0], work[1])
    total = sums.numpy().cumsum(axis=1, dtype=np.float64)[:, -1]
    normaliser = maximum.astype(np.float64) + np.log(total)
    group_max = x.view(len(x), ops.LANES, -1).amax(dim=1).numpy()
    logits: F32 = x.numpy()
    return [
        _row(logits[place], group_max[place], normaliser[place], int(token_ids[place]), int(num_top[place]))
        for place in range(len(x))
    ]


def _row(x: F32, group_max: F32, normaliser: np.float64, token: int, num_top: int) -> TokenLogprobs:
    chosen = x[token]
    top = largest(x, group_max, num_top) if num_top else np.zeros(0, np.int64)
    return TokenLogprobs(
        logprob=_finite(float(chosen - normaliser)),
        rank=1 + int(np.count_nonzero(x > chosen)) + int(np.count_nonzero(x[:token] == chosen)),
        top_ids=top.tolist(),
        top_logprobs=[_finite(value) for value in (x[top] - normaliser).tolist()],
    )


def _finite(logprob: float) -> float:
    return max(logprob, MINUS_INFINITY)
