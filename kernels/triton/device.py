"""What launches tell kernels about the machine they run on."""

import functools

import torch
import triton.language as tl
from triton.runtime import driver

PLAIN = {"enable_fp_fusion": False}
"""Launch options of a kernel that rounds each product before it is added to something. Every launch says which it
wants: versions of Triton differ in what they do unasked."""

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Of a program, at most. A CPU has what it takes."""
    if device.type == "cpu":
        return 2**31
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
