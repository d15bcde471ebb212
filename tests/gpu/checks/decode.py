"""How fast decoding reads K and V: one row a sequence."""

import torch
from gpu.bench import Bench
from gpu.contexts import Contexts
from gpu.pages import Kind

from configs.kv import KVFormat

BF16 = torch.bfloat16
TARGETS = {KVFormat.BF16: 0.75, KVFormat.FP8_E4M3: 0.65, KVFormat.INT8: 0.65, KVFormat.INT4: 0.5}
"""Of a copy's bytes a second, from 256k tokens on."""
GRADED_FROM = 256 << 10


def run(bench: Bench) -> None:
    for format, target in TARGETS.items():
        kind = Kind(BF16, (format, format), group=2, kv_heads=8, head_dim=128)
        if bench.is_tiny:
            kind = Kind(BF16, (format, format), group=2, kv_heads=1, head_dim=32)
        for sequences, length in bench.some([(1, 20)], [(b, n) for n in (512, 4096, 32768) for b in (1, 16, 64, 256)]):
            with bench.findings.case(f"decode {format.value} {sequences} x {length}"):
                contexts = Contexts(bench, kind, sequences, length)
                goal = target if sequences * length >= GRADED_FROM else None
                calls = contexts.calls(bench.copies(contexts.nbytes))
                bench.bandwidth(f"decode {format.value:9} {sequences:4} x {length:5}", contexts.nbytes, calls, goal)
