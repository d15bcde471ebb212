"""Writing the KV pool and copying its blocks on the CPU in C++ (`csrc/store.h`, `csrc/copy.cpp`). Contracts: `kernels.ops`;
formulas: `kernels.reference.kv_formats`."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.kv import KVFormat, KVHalf
from kernels.cpu import library
from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import native_candidates
from kernels.ops import LayerPages
from kernels.reference import kv_formats
from kernels.registry import Accepted, Candidate, Refused

ISAS = {dtype: ("baseline", "avx2", "avx512") for dtype in (torch.float32, torch.bfloat16)}
"""Instruction sets that the sources of `store_kv` have."""

FORMATS = {format: number for number, format in enumerate(KVFormat)}
"""As in `csrc/kv_encode.h`."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class StoreHalf(ctypes.Structure):
    """Mirror of the struct in `csrc/store.h`."""

    _fields_ = (
        ("x", _PTR),
        ("stride", _I64),
        ("format", _I64),
        ("codes", _I64),
        ("scales", _I64),
        ("zeros", _I64),
        ("channels", _PTR),
        ("signs", _PTR),
    )


class StoreCall(ctypes.Structure):
    """Mirror of the struct in `csrc/store.h`."""

    _fields_ = (
        ("k", StoreHalf),
        ("v", StoreHalf),
        ("pool", _PTR),
        ("block_bytes", _I64),
        ("block_size", _I64),
        ("kv_heads", _I64),
        ("head_dim", _I64),
        ("slots", _PTR),
        ("tokens", _I64),
    )


@functools.cache
def rotation_signs(head_dim: int) -> torch.Tensor:
    """fp32 [head_dim], kept for good: C++ gets its address."""
    return kv_formats.signs(head_dim, torch.device("cpu"))


@dataclass(frozen=True)
class NativeStore:
    """`store_kv` by one entry of the library."""

    entry: Callable[..., int]

    def __call__(self, k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
        tokens, kv_heads, dims = k.shape
        k_half, v_half = pages.halves
        call = StoreCall(
            _half(k, pages, k_half, pages.k_channels),
            _half(v, pages, v_half, pages.v_channels),
            pages.pool.data_ptr(),
            pages.spec.block_bytes,
            pages.spec.block_size,
            kv_heads,
            dims,
            slot_mapping.data_ptr(),
            tokens,
        )
        if self.entry(call):
            raise MemoryError("no memory to quantise a head")


def _half(x: torch.Tensor, pages: LayerPages, half: KVHalf, channels: torch.Tensor | None) -> StoreHalf:
    return StoreHalf(
        x.data_ptr(),
        x.stride(0),
        FORMATS[half.format],
        half.codes.offset,
        0 if half.scales is None else half.scales.offset,
        0 if half.zeros is None else half.zeros.offset,
        None if channels is None else channels.data_ptr(),
        rotation_signs(x.shape[2]).data_ptr() if pages.kind.is_rotated(half.format) else None,
    )


@dataclass(frozen=True)
class NativeCopy:
    """`copy_blocks` by the library."""

    entry: Callable[..., None]

    def __call__(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        flat = [block for pair in pairs for block in pair]
        self.entry(pool.data_ptr(), pool.shape[1], (ctypes.c_int64 * len(flat))(*flat), len(pairs))


def native_store(native: NativeLibrary, ending: str) -> NativeStore:
    """ending: "bf16_avx2"."""
    return NativeStore(native.function(f"store_kv_{ending}", [ctypes.POINTER(StoreCall)], ctypes.c_int32))


def native_copy(native: NativeLibrary) -> NativeCopy:
    return NativeCopy(native.function("copy_blocks", [_PTR, _I64, ctypes.POINTER(_I64), _I64]))


def _offer_copy(device: str, dtype: torch.dtype) -> Accepted | Refused:
    """Bits move: one entry serves all instruction sets and dtypes."""
    if device != "cpu":
        return Refused(f"runs on the CPU, not on {device}")
    native = library.load()
    return Refused(library.refusal() or "not loaded") if native is None else Accepted(native_copy(native))


CANDIDATES = (
    *native_candidates("store_kv", "store_kv", ISAS, native_store),
    Candidate("copy_blocks", "C++", _offer_copy),
)
