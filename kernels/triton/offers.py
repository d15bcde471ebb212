"""Which ops Triton serves, and on which machines. Imports no triton: most machines have none."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from kernels.registry import INVARIANT, Accepted, Candidate, Refused

NAME = "Triton"

OLDEST_VERSION = (3, 6)
OLDEST_CAPABILITY = (8, 0)
"""Ampere: the first with bf16 and asynchronous loads."""

NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
BYTES = (torch.uint8,)


@functools.cache
def refusal() -> str | None:
    """Why Triton cannot run on this machine's GPU, in words, or None. Compiles and runs a kernel to know."""
    if torch.version.hip:
        return "written for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return "no GPU here"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (capability, OLDEST_CAPABILITY))
        return f"needs compute capability {needs}, this GPU has {has}"
    try:
        import triton
    except ImportError as error:
        return f"cannot be imported: {error}"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_VERSION:
        return f"needs version {'.'.join(map(str, OLDEST_VERSION))}, this is {triton.__version__}"
    return _trial()


def _trial() -> str | None:
    """Why a small kernel does not run, or None. Triton needs a C compiler and Python's headers, and finds out late."""
    from kernels.triton.elementwise import gather_rows

    try:
        table = torch.arange(4.0, device="cuda").view(2, 2)
        found = gather_rows(table, torch.tensor([1, 0], device="cuda"), 2.0).tolist()
    except Exception as error:  # whatever the compiler, the linker and the driver come up with
        return f"does not run: {' '.join(str(error).split()) or type(error).__name__}"
    return None if found == [[4.0, 6.0], [0.0, 2.0]] else "computes something else than it should"


def _candidates(
    module: str, dtypes: tuple[torch.dtype, ...], *ops: str, backend: str = "triton", on_request: bool = False
) -> tuple[Candidate, ...]:
    """Ops that functions of the same name in `kernels.triton.MODULE` serve, on tensors of `dtypes`."""

    def candidate(op: str) -> Candidate:
        def offer(device: str, dtype: torch.dtype) -> Accepted | Refused:
            if device != "cuda":
                return Refused(f"runs on a GPU, not on {device}")
            if dtype not in dtypes:
                return Refused(f"does not work on {str(dtype).removeprefix('torch.')}")
            if reason := refusal():
                return Refused(reason)
            function: Callable[..., Any] = getattr(importlib.import_module(f"kernels.triton.{module}"), op)
            return Accepted(function)

        return Candidate(op, NAME, offer, backend=backend, on_request=on_request, device="cuda")

    return tuple(candidate(op) for op in ops)


CANDIDATES = (
    *_candidates(
        "elementwise", NUMBERS, "rms_norm", "add_rms_norm", "rotary", "norm_rotary", "gate_mul", "gather_rows"
    ),
    *_candidates("linear", NUMBERS, "pack_linear", backend=INVARIANT, on_request=True),
    *_candidates("linear", NUMBERS, "pack_coded_linear"),
    *_candidates("store", NUMBERS, "store_kv"),
    *_candidates("attention", NUMBERS, "paged_attention"),
    *_candidates("sampling", NUMBERS, "draw"),
    *_candidates("blocks", BYTES, "copy_blocks", "gather_blocks", "scatter_blocks"),
)
