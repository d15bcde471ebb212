"""Plain torch: the oracle of every kernel, and what serves where no kernel can.

Written to be read and trusted, not to be fast. Accepts every device and dtype.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernels.reference.attention import paged_attention
from kernels.reference.elementwise import add_rms_norm, gate_mul, gather_rows, norm_rotary, rms_norm, rotary
from kernels.reference.linear import pack_coded_linear, pack_linear
from kernels.reference.pages import copy_blocks, gather_blocks, scatter_blocks, store_kv
from kernels.reference.sampling import draw
from kernels.reference.softmax import softmax_weights
from kernels.reference.truncation import draw_truncated
from kernels.registry import Accepted, Candidate

NAME = "torch reference"


def _candidate(function: Callable[..., Any]) -> Candidate:
    def offer(device: str, dtype: torch.dtype) -> Accepted:
        return Accepted(function)

    return Candidate(function.__name__, NAME, offer, backend="reference")


CANDIDATES = tuple(
    _candidate(function)
    for function in (
        rms_norm,
        add_rms_norm,
        rotary,
        norm_rotary,
        gate_mul,
        gather_rows,
        pack_linear,
        pack_coded_linear,
        store_kv,
        paged_attention,
        copy_blocks,
        gather_blocks,
        scatter_blocks,
        softmax_weights,
        draw_truncated,
        draw,
    )
)
