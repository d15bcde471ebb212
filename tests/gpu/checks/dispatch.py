"""What serves each op on this GPU, as the product chooses: Triton, wherever it can."""

import time

import torch
from gpu.bench import Bench
from gpu.turns import native_kernels

from configs.kv import KVFormat
from kernels.registry import AUTO, INVARIANT, choose
from kernels.triton import offers

OPS = (
    "rms_norm", "add_rms_norm", "rotary", "norm_rotary", "gate_mul", "gather_rows",
    "pack_linear", "pack_coded_linear", "store_kv", "paged_attention", "copy_blocks", "gather_blocks", "scatter_blocks",
    "draw",
)  # fmt: skip
"""That Triton has."""
NUMBERS = (torch.bfloat16, torch.float16, torch.float32)
ON_REQUEST = {"pack_linear": INVARIANT}
ON_PAGES = ("store_kv", "paged_attention")


def run(bench: Bench) -> None:
    if bench.is_tiny:
        bench.findings.figure("what serves", "not asked: there is no GPU")
        return
    versions = f"torch {torch.__version__}, {torch.cuda.get_device_name()}"
    bench.findings.figure("on", versions, torch=torch.__version__, gpu=torch.cuda.get_device_name())
    for op in OPS:
        for dtype in (torch.uint8,) if op.endswith("_blocks") else NUMBERS:
            check(bench, op, dtype)
    start = time.monotonic()
    words = native_kernels(bench.scratch)
    bench.findings.figure("C++ kernels, for what a CPU draws", f"{words}, {time.monotonic() - start:.0f} s")


def check(bench: Bench, op: str, dtype: torch.dtype) -> None:
    refused: dict[str, list[str]] = {}
    for format in KVFormat if op in ON_PAGES else [None]:
        choice = choose(op, "cuda", dtype, None if format is None else (format, format), ON_REQUEST.get(op, AUTO))
        if choice.name != offers.NAME:
            reason = dict(choice.refused).get(offers.NAME, "no reason given")
            refused.setdefault(f"{choice.name} serves ({offers.NAME}: {reason})", []).append(
                format.value if format else ""
            )
    text = "; ".join(f"{' '.join(formats)} {words}".strip() for words, formats in refused.items())
    bench.findings.verdict(f"{op} in {str(dtype).removeprefix('torch.')}", not refused, text or offers.NAME)
