"""How many threads compute an op: a number of the process, one before it is set."""

import ctypes

import torch

from kernels.cpu import library


def set_threads(count: int) -> None:
    """The native kernels have threads of their own (`cpu/csrc/threads.cpp`). Beside them torch gets one thread, since
    idle members of its pool spin on the cores that the kernels want; without native kernels it gets them all."""
    native = library.load()
    if native is not None:
        native.function("set_threads", (ctypes.c_int64,))(count)
    torch.set_num_threads(count if native is None else 1)


def num_threads() -> int:
    native = library.load()
    if native is None:
        return torch.get_num_threads()
    return int(native.function("threads", (), ctypes.c_int64)())
