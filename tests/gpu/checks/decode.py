"""How fast decoding reads K and V: one row a sequence. And how much of the time merging splits takes."""

from collections.abc import Callable, Sequence
from unittest.mock import patch

from gpu.bench import Bench, Call
from gpu.contexts import Contexts, timed_kind

from configs.kv import KVFormat
from kernels.triton import attention

TARGETS = {KVFormat.BF16: 0.75, KVFormat.FP8_E4M3: 0.65, KVFormat.INT8: 0.65, KVFormat.INT4: 0.5}
"""Of a copy's bytes a second, from 256k tokens on."""
GRADED_FROM = 256 << 10
MERGING = 0.05
"""Of the time."""


def run(bench: Bench) -> None:
    for format, target in TARGETS.items():
        kind = timed_kind(bench, format)
        for sequences, length in bench.some([(1, 20)], [(b, n) for n in (512, 4096, 32768) for b in (1, 16, 64, 256)]):
            with bench.findings.case(f"decode {format.value} {sequences} x {length}"):
                contexts = Contexts(bench, kind, sequences, length)
                is_graded = sequences * length >= GRADED_FROM
                what, calls = f"{sequences:4} x {length:5}", contexts.calls(bench.copies(contexts.nbytes))
                goal = target if is_graded else None
                seconds = bench.bandwidth(f"decode {format.value:9} {what}", contexts.nbytes, calls, goal)
                if format is KVFormat.BF16 and (is_graded or bench.is_tiny):
                    merging(bench, calls, seconds)


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


def merging(bench: Bench, calls: Sequence[Call], seconds: float) -> None:
    """From what is left without it."""
    with patch.object(attention, "merge_splits", Nothing()):
        share = max(0.0, 1 - bench.seconds(calls) / seconds)
    text = f"{share:.1%} of the time{bench.aim(f'{MERGING:.0%}', share <= MERGING)}"
    bench.findings.figure("  merging splits", text, share=share, target=MERGING)
