"""Is a row's result the same bits alone and in company? Asked of the packed weights at start-up, on this machine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from kernels.ops import PackedLinear, linear
from kernels.threads import num_threads, set_threads

ON_A_GPU = "may be changed a little by other requests, since rounding differs (not checked on a GPU)"
"""For the start-up block: libraries choose a kernel by the number of rows there, and nothing here has looked."""

ROWS = 40
WINDOWS = ((0, 1), (ROWS - 1, ROWS), (7, 9), (3, 6), (20, 25), (1, 17), (5, 22), (0, 33))
"""Rows [start, end) that are computed again by themselves: each way in which kernels treat few rows."""


def probe(packed: PackedLinear, dtype: torch.dtype) -> str | None:
    """None if rows of a linear layer are bit-exact, else what they depend on, in words.

    Random rows, all together, in windows, with one thread and with all of this process's.
    """
    generator = torch.Generator().manual_seed(packed.in_features)
    x = torch.randn(ROWS, packed.in_features, generator=generator).to(dtype)
    together = linear(x, packed)
    if window := _differing_window(x, together, packed):
        return f"other bits for {_rows(window)} computed alone"
    with _one_thread():
        if not torch.equal(linear(x, packed), together):
            return "other bits with one thread than with several"
        if window := _differing_window(x, together, packed):
            return f"other bits for {_rows(window)} computed alone by one thread"
    return None


def inexact(layers: Mapping[str, PackedLinear], dtype: torch.dtype) -> dict[str, str]:
    """The layers that are not exact, and why, in words.

    layers: by name. One of each shape is probed: those of one shape are computed alike.
    """
    shapes: dict[tuple[int, int], str] = {}
    for name, packed in layers.items():
        shapes.setdefault((packed.out_features, packed.in_features), name)
    return {name: reason for name in shapes.values() if (reason := probe(layers[name], dtype))}


def report(failures: Mapping[str, str]) -> str:
    """For the start-up block: that other requests change no answer, or which layers are not exact and why."""
    if not failures:
        return "not changed by other requests in the least, bit for bit (checked on this machine)"
    found = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    return f"may be changed a little by other requests or by --num-threads, since rounding differs ({found})"


def _differing_window(x: torch.Tensor, together: torch.Tensor, packed: PackedLinear) -> tuple[int, int] | None:
    for start, end in WINDOWS:
        if not torch.equal(linear(x[start:end], packed), together[start:end]):
            return start, end
    return None


def _rows(window: tuple[int, int]) -> str:
    return f"{window[1] - window[0]} of {ROWS} rows"


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = num_threads()
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)
