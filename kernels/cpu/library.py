"""Finds, builds if need be, and loads the native library; says which instruction sets of it this CPU can run."""

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.cpu.build import ISA_FLAGS, BuildError, cached_library, installed_library

log = logging.getLogger(__name__)

ISAS = tuple(ISA_FLAGS)
"""Instruction sets, weakest first: baseline, avx2, avx512, avx512bf16, amx."""

ISA_TITLES = dict(zip(ISAS, ("portable", "AVX2", "AVX-512", "AVX-512 bf16", "AMX bf16"), strict=True))


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library. Entries are named `octavo_NAME` or, one an instruction set, `octavo_NAME_ISA`."""

    path: Path
    handle: ctypes.CDLL
    cpu_isas: tuple[str, ...]
    """Instruction sets that this CPU runs, weakest first."""

    @property
    def isa(self) -> str:
        """The strongest instruction set of this CPU."""
        return self.cpu_isas[-1]

    def refusal(self, name: str, isa: str) -> str | None:
        """Why entry `octavo_NAME_ISA` cannot be used here, in words, or None if it can."""
        if isa not in self.cpu_isas:
            return f"this CPU or its operating system has no {ISA_TITLES[isa]}"
        if not hasattr(self.handle, f"octavo_{name}_{isa}"):
            return f"the compiler that built {self.path.name} has no {ISA_TITLES[isa]}"
        return None

    def function(self, name: str, argtypes: Sequence[Any], restype: Any = None) -> Callable[..., Any]:
        """Entry `octavo_NAME`, its types set. Raises AttributeError where there is none."""
        prototype = ctypes.CFUNCTYPE(restype, *argtypes)
        return prototype((f"octavo_{name}", self.handle))

    def address(self, name: str) -> int:
        """Of entry `octavo_NAME`."""
        address = ctypes.cast(getattr(self.handle, f"octavo_{name}"), ctypes.c_void_p).value
        assert address is not None, name
        return address


@functools.cache
def load() -> NativeLibrary | None:
    """The library: as installed, else from the user's cache, compiled there on first use.

    None where it cannot be had (`refusal` says why); a warning is given once.
    """
    outcome = _attempt()
    if isinstance(outcome, NativeLibrary):
        return outcome
    log.warning("No native kernels: %s. Slow torch code serves instead.", outcome)
    return None


def refusal() -> str | None:
    """Why `load()` gives None, in words; None if it gives a library."""
    outcome = _attempt()
    return None if isinstance(outcome, NativeLibrary) else outcome


@functools.cache
def _attempt() -> NativeLibrary | str:
    try:
        path = find_library(default_cache())
        return open_library(path)
    except (BuildError, OSError) as error:
        return str(error)


def default_cache() -> Path:
    """The user's folder for compiled kernels."""
    return Path.home() / ".cache" / "octavo" / "kernels"


def find_library(cache: Path) -> Path:
    """The installed library of the current sources, else the one in folder `cache`. Raises BuildError."""
    installed = installed_library()
    return installed if installed.exists() else cached_library(cache)


def open_library(path: Path) -> NativeLibrary:
    """Raises OSError."""
    handle = ctypes.CDLL(str(path))
    bits = handle.octavo_cpu_isas()
    usable = ("baseline", *(isa for index, isa in enumerate(ISAS[1:]) if bits >> index & 1))
    return NativeLibrary(path, handle, usable)
