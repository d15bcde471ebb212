"""Calls of the native library, and steps made of them that run without Python.

A small model's step is hundreds of short calls, and preparing them in Python takes longer than many of them run:
weights that stream by have emptied the caches of all that the interpreter needs. So a step is walked through once, with
no call made, and noted down as a `Program`: which entry is called with which arguments. Running it makes the calls.
What changes from step to step are the numbers in the tensors, which C++ reads each time, and the numbers of rows, which
`run` is told.

Results of recorded calls lie in an `Arena`, where nobody else's ever will.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.cpu import library
from kernels.cpu.library import NativeLibrary

T = TypeVar("T")

ALIGNMENT = 64
"""Bytes: results begin at multiples of it."""

OUT_OF_MEMORY = "no memory for what a kernel keeps while it works"


class NotRecordable(Exception):
    """A step does something else than native calls and views. The message says what."""


class Call(ctypes.Structure):
    """The arguments of an entry: the mirror of a struct in `csrc`."""

    rows_: ClassVar[str]
    """The field with the number of rows, tokens or sequences. No other one depends on it, but for addresses."""


class Entry:
    """An entry `int32_t octavo_NAME(const void *call)` of the library, which gives 0, or 1 where there is no memory."""

    def __init__(self, native: NativeLibrary, name: str) -> None:
        self._function = native.function(name, (ctypes.c_void_p,), ctypes.c_int32)
        self._address = native.address(name)

    def __call__(self, call: Call) -> None:
        """Makes the call, or only notes it down while a step is recorded. Raises MemoryError.

        What `call` points to is the caller's to keep alive: of a recorded call as long as the program, but for results,
        which are the arena's.
        """
        if (recording := _recording.get()) is not None:
            recording.calls.append((self._address, call))
        elif self._function(ctypes.addressof(call)):
            raise MemoryError(OUT_OF_MEMORY)


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor for the result of a native call, contents undefined."""
    recording = _recording.get()
    return torch.empty(shape, dtype=dtype) if recording is None else recording.arena.take(shape, dtype)


class Arena:
    """Memory of recorded results. While a step is recorded, what is no longer referred to is given out again, and
    programs recorded one after another share it: the results of one are valid until another one runs."""

    CHUNK = 4 << 20

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}
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

    def holds(self, x: torch.Tensor) -> bool:
        """Whether it was taken here."""
        starts = ((chunk.ctypes.data, len(chunk)) for chunk in self._chunks)
        return any(start <= _storage(x) < start + size for start, size in starts)

    def _more(self, size: int) -> npt.NDArray[np.uint8]:
        while self._chunk < len(self._chunks) and self._used + size > len(self._chunks[self._chunk]):
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            whole = np.empty(max(size, self.CHUNK) + ALIGNMENT, np.uint8)
            self._chunks.append(whole[-whole.ctypes.data % ALIGNMENT :])
        self._used += size
        return self._chunks[self._chunk][self._used - size : self._used]


class Program:
    """Recorded calls."""

    def __init__(self, native: NativeLibrary, calls: Sequence[tuple[int, Call]], sizes: Sequence[int]) -> None:
        """sizes: the numbers of rows that were recorded, each another one. Raises NotRecordable."""
        self._run = native.function("run_program", (_PTR, _I64, _PTR, _I64, _PTR), ctypes.c_int32)
        self._kept = calls
        self._calls = _words([(entry, ctypes.addressof(call)) for entry, call in calls])
        places = []
        for _, call in calls:
            rows = getattr(call, call.rows_)
            if rows not in sizes:
                raise NotRecordable(f"{type(call).__name__} has {rows} rows, which no step's size explains")
            places.append((ctypes.addressof(call) + getattr(type(call), call.rows_).offset, sizes.index(rows)))
        self._places = _words(places)

    def run(self, sizes: Sequence[int]) -> None:
        """Makes the calls with these numbers of rows, none larger than what was recorded. Raises MemoryError."""
        count = len(self._kept)
        if self._run(self._calls, count, self._places, count, (_I64 * len(sizes))(*sizes)):
            raise MemoryError(OUT_OF_MEMORY)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses whatever torch computes by itself, which a program would leave out."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena = arena
        self.calls: list[tuple[int, Call]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = func.is_view and (func is not _LIFT or self.arena.holds(args[0]))
        result = func(*args, **(kwargs or {})) if is_view else None  # some of these copy when they must
        inputs = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        outputs = {_storage(x) if isinstance(x, torch.Tensor) else None for x in tree_leaves(result)}
        if not outputs <= inputs:
            raise NotRecordable(f"{func} is computed by torch")
        return result


_LIFT = torch.ops.aten.lift_fresh.default
"""Called a view, as it returns what it is given: a tensor just made of Python's or numpy's numbers, or by `take`."""

_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


def record(step: Callable[[], T], arena: Arena, sizes: Sequence[int]) -> tuple[Program, T]:
    """Notes the native calls of `step` down; none is made. Raises NotRecordable, and what `step` raises.

    sizes: the numbers of rows of its tensors, each another one: the largest that a run may have. What `step` returns
    lies in the arena, and each run puts its results there.
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
    return Program(native, recording.calls, sizes), result


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _words(pairs: Sequence[tuple[int, int]]) -> ctypes.Array[ctypes.c_int64]:
    return (_I64 * (2 * len(pairs)))(*(word for pair in pairs for word in pair))


_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
