"""Calls of the native library, and steps made of them that run again without Python.

A small model's decode step is hundreds of short calls, and preparing one in Python takes longer than many of them run.
Where a step's tensors lie where those of an earlier step of as many rows lay, its calls are the same, argument by
argument: `record` notes them down while they are made, and the `Program` makes them again. The numbers in the tensors
may be others; what a call does by them (which pages it reads, how it divides the work) is decided in C++ each time.

Results of recorded calls lie in an `Arena`, where nobody else's ever will.
"""

import ctypes
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.cpu import library
from kernels.cpu.library import NativeLibrary

T = TypeVar("T")

ALIGNMENT = 64
"""Bytes: results begin at multiples of it."""


class NotRecordable(Exception):
    """A step does something else than native calls and views. The message says what."""


class Entry:
    """An entry `int32_t octavo_NAME(const void *call)` of the library, which gives 0, or 1 where there is no memory."""

    def __init__(self, native: NativeLibrary, name: str) -> None:
        self._function = native.function(name, (ctypes.c_void_p,), ctypes.c_int32)
        self._address = native.address(name)

    def __call__(self, call: ctypes.Structure) -> None:
        """Raises MemoryError. What `call` points to is the caller's to keep alive: of a recorded call as long as the
        program, but for results, which are the arena's."""
        if self._function(ctypes.addressof(call)):
            raise MemoryError("no memory for what a kernel keeps while it works")
        if (recording := _recording.get()) is not None:
            recording.calls.append((self._address, call))


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor for the result of a native call, contents undefined."""
    recording = _recording.get()
    return torch.empty(shape, dtype=dtype) if recording is None else recording.arena.take(shape, dtype)


class Arena:
    """Memory of recorded results. While a step is recorded, what is no longer referred to is given out again, and
    programs recorded one after another share it: the results of one are valid until another one runs."""

    CHUNK = 4 << 20

    def __init__(self) -> None:
        self._chunks: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._free: dict[int, list[np.ndarray[Any, np.dtype[np.uint8]]]] = {}
        self._chunk = self._used = 0

    def rewind(self) -> None:
        """All of it is free again."""
        self._free, self._chunk, self._used = {}, 0, 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(size, [])
        room = free.pop() if free else self._more(size)
        own = room[:]  # the storage keeps this view alive, and nobody else does
        weakref.finalize(own, free.append, room)
        return torch.from_numpy(own).view(dtype)[: int(np.prod(shape))].view(shape)

    def _more(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        while self._chunk < len(self._chunks) and self._used + size > len(self._chunks[self._chunk]):
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            whole = np.empty(max(size, self.CHUNK) + ALIGNMENT, np.uint8)
            self._chunks.append(whole[-whole.ctypes.data % ALIGNMENT :])
        self._used += size
        return self._chunks[self._chunk][self._used - size : self._used]


class Program:
    """Recorded calls. `run` makes them again; raises MemoryError."""

    def __init__(self, native: NativeLibrary, calls: list[tuple[int, ctypes.Structure]]) -> None:
        self._run = native.function("run_program", (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int32)
        self._kept = [call for _, call in calls]
        flat = [word for entry, call in calls for word in (entry, ctypes.addressof(call))]
        self._calls = (ctypes.c_void_p * len(flat))(*flat)
        self._count = len(calls)

    def run(self) -> None:
        if self._run(self._calls, self._count):
            raise MemoryError("no memory for what a kernel keeps while it works")


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses whatever torch computes by itself, which a program would leave out."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena = arena
        self.calls: list[tuple[int, ctypes.Structure]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        outputs = {_storage(x) if isinstance(x, torch.Tensor) else None for x in tree_leaves(result)}
        if func._schema.is_mutable or not outputs or not outputs <= inputs:
            raise NotRecordable(f"{func} is computed by torch")
        return result


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def record(step: Callable[[], T], arena: Arena) -> tuple[Program, T]:
    """Runs `step` and notes its native calls down. Raises NotRecordable, and what `step` raises.

    What it returns lies in the arena; so does what each run of the program puts in its place.
    """
    native = library.load()
    if native is None:
        raise NotRecordable("there is no native library")
    arena.rewind()
    recording = _Recording(arena)
    token = _recording.set(recording)
    try:
        with recording:
            result = step()
    finally:
        _recording.reset(token)
    return Program(native, recording.calls), result


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
