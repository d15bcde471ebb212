"""Codes, scales and minimums of a GGUF tensor, apart.

The gguf package reads the codes: of a copy whose scales are 1 and whose minimums are 0, it gives them as numbers.
"""

from collections.abc import Callable

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from configs.gguf_file import TYPES
from configs.gguf_forms import FORMS
from kernels.grouped_weight import GroupedWeight

Numbers = np.ndarray
NUMBERS = 2**22
"""Of a tensor that are fp32 at a time: a table for a large vocabulary is half a gibibyte of them."""
ONE = np.float16(1).reshape(1).view(np.uint8)
"""The bytes of a scale."""
FACTOR_ONES = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], np.uint8)
"""Bytes of the eight scales, 1, and minimums, 0, of a block of Q4_K or Q5_K."""


def read_codes(data: np.ndarray, type: int) -> GroupedWeight:
    """data: uint8 [outputs, bytes of a row], of ggml's type of that number, one of `FORMS`. Fresh tensors."""
    kind, form = TYPES[type], FORMS[TYPES[type].name]
    inputs = data.shape[1] // kind.num_bytes * kind.numbers
    codes = torch.empty((len(data), inputs), dtype=torch.int8)
    scales, minimums = [], []
    step = max(1, NUMBERS // inputs)
    for start in range(0, len(data), step):
        rows = data[start : start + step]
        blocks = rows.reshape(-1, kind.num_bytes).copy()
        some_scales, some_minimums = READERS[kind.name](blocks)
        numbers = gguf.quants.dequantize(blocks.reshape(rows.shape), Kind(type))
        codes[start : start + step] = torch.from_numpy(numbers)
        scales.append(some_scales.reshape(len(rows), -1))
        if some_minimums is not None:
            minimums.append(some_minimums.reshape(len(rows), -1))
    return GroupedWeight(
        codes,
        torch.from_numpy(np.concatenate(scales)),
        torch.from_numpy(np.concatenate(minimums)) if minimums else None,
        form.bits,
        form.lowest,
    )


def _scale(blocks: np.ndarray, start: int = 0, becomes: np.ndarray | int = ONE) -> np.ndarray:
    """The fp16 number of each block at that byte, which is replaced."""
    number = blocks[:, start : start + 2].copy().view(np.float16)
    blocks[:, start : start + 2] = becomes
    return number


def _scales(blocks: np.ndarray) -> tuple[Numbers, None]:
    return _scale(blocks), None


def _scales_and_minimums(blocks: np.ndarray) -> tuple[Numbers, Numbers]:
    return _scale(blocks), _scale(blocks, 2, 0)


def _k_scales_and_minimums(blocks: np.ndarray) -> tuple[Numbers, Numbers]:
    """Of Q4_K and Q5_K: products of a number of the block and a factor of the group, exact in fp32."""
    factors, minimum_factors = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16].copy())
    blocks[:, 4:16] = FACTOR_ONES
    scales = _scale(blocks).astype(np.float32) * factors
    return scales, -(_scale(blocks, 2, 0).astype(np.float32) * minimum_factors)


def _q6_k_scales(blocks: np.ndarray) -> tuple[Numbers, None]:
    factors = blocks[:, 192:208].copy().view(np.int8)
    blocks[:, 192:208] = 1
    return _scale(blocks, 208).astype(np.float32) * factors, None


READERS: dict[str, Callable[[np.ndarray], tuple[Numbers, Numbers | None]]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), _scales),
    **dict.fromkeys(("Q4_1", "Q5_1"), _scales_and_minimums),
    **dict.fromkeys(("Q4_K", "Q5_K"), _k_scales_and_minimums),
    "Q6_K": _q6_k_scales,
}
"""Name of a type -> what takes scales and minimums out of blocks, uint8 [blocks, bytes]. In a block: ggml-common.h."""
