"""Is a row's result the same bits alone and in company? Asked of the packed weights at start-up, on this machine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from kernels.ops import PackedLinear, linear
from kernels.registry import INVARIANT
from kernels.threads import num_threads, set_threads

ON_A_GPU = (
    "may be changed a little by other requests, since sums of another number of rows are rounded otherwise "
    f"(--{INVARIANT} prevents it)"
)
"""For the start-up block: libraries choose a kernel by the number of rows there."""

CPU = torch.device("cpu")
Windows = tuple[tuple[int, int], ...]
"""Rows [start, end) that are computed again by themselves."""
WINDOWS: Windows = ((0, 1), (39, 40), (7, 9), (3, 6), (20, 25), (1, 17), (5, 22), (0, 33), (0, 40))
"""Each way in which kernels of a CPU treat few rows."""
FEWEST, MOST, NUMBERS = 300, 8192, 2**23
"""Rows on a GPU: as many as have so many outputs. With more, all tiles are the largest (`kernels.triton.linear`)."""


def gpu_windows(outputs: int) -> Windows:
    """Some rows for each tile that a layer of so many outputs may be computed in; one window has them all."""
    most = max(FEWEST, min(MOST, NUMBERS // outputs))
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(int(sizes[-1] / 1.25))
    starts = [size * 37 % (most - size + 1) for size in sizes]
    return ((most - 1, most), *((start, start + size) for start, size in zip(starts, sizes, strict=True)))


def probe(packed: PackedLinear, dtype: torch.dtype, device: torch.device = CPU) -> str | None:
    """None if rows of a linear layer are bit-exact, else what they depend on, in words.

    Random rows, all together and in windows; on a CPU with one thread and with all of this process's.
    """
    windows = WINDOWS if device == CPU else gpu_windows(packed.out_features)
    generator = torch.Generator().manual_seed(packed.in_features)
    x = torch.randn(_total(windows), packed.in_features, generator=generator).to(device, dtype)
    together = linear(x, packed)
    if window := _differing_window(x, together, packed, windows):
        return f"other bits for {_rows(window, windows)} computed alone"
    if device != CPU:
        return None
    with _one_thread():
        if not torch.equal(linear(x, packed), together):
            return "other bits with one thread than with several"
        if window := _differing_window(x, together, packed, windows):
            return f"other bits for {_rows(window, windows)} computed alone by one thread"
    return None


def inexact(layers: Mapping[str, PackedLinear], dtype: torch.dtype, device: torch.device = CPU) -> dict[str, str]:
    """The layers that are not exact, and why, in words.

    layers: by name. One of each shape is probed: those of one shape are computed alike.
    """
    shapes: dict[tuple[int, int], str] = {}
    for name, packed in layers.items():
        shapes.setdefault((packed.out_features, packed.in_features), name)
    return {name: reason for name in shapes.values() if (reason := probe(layers[name], dtype, device))}


def report(failures: Mapping[str, str], device: torch.device = CPU) -> str:
    """For the start-up block: that other requests change no answer, or which layers are not exact and why."""
    if not failures:
        return "not changed by other requests in the least, bit for bit (checked on this machine)"
    found = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    causes = "other requests or by --num-threads" if device == CPU else "other requests"
    return f"may be changed a little by {causes}, since rounding differs ({found})"


def _differing_window(
    x: torch.Tensor, together: torch.Tensor, packed: PackedLinear, windows: Windows
) -> tuple[int, int] | None:
    for start, end in windows:
        if not torch.equal(linear(x[start:end], packed), together[start:end]):
            return start, end
    return None


def _rows(window: tuple[int, int], windows: Windows) -> str:
    return f"{window[1] - window[0]} of {_total(windows)} rows"


def _total(windows: Windows) -> int:
    return max(end for _, end in windows)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)
