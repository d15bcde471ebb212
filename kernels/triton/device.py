"""What launches tell kernels about the machine they run on."""

import functools

import torch
import triton.language as tl
from triton.runtime import driver

from kernels.triton.codes import INTERPRETED

PLAIN = {"enable_fp_fusion": False}
"""Launch options of a kernel that rounds each product before it is added to something. Every launch says which it
wants: versions of Triton differ in what they do unasked."""

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def is_interpreted() -> bool:
    """Kernels run in Triton's interpreter, on a CPU."""
    return bool(INTERPRETED)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """In which `tl.dot` multiplies numbers of `dtype`. The interpreter would multiply the bits of bf16."""
    return tl.float32 if is_interpreted() else DTYPES[dtype]


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Of a program, at most. A CPU has what it takes."""
    if device.type == "cpu":
        return 2**31
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
