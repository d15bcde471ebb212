"""The KV pool and paged attention on the CPU in C++. Contracts: `kernels.ops`.

Sources: `csrc/store.cpp`; `csrc/attention.h` says how a row's result is defined.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.cpu import library
from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import native_candidates
from kernels.ops import LayerPages
from kernels.registry import Accepted, Candidate, Refused

ISAS = {
    torch.float32: ("baseline", "avx2", "avx512"),
    torch.bfloat16: ("baseline", "avx2", "avx512", "avx512bf16", "amx"),
}
"""Instruction sets that the sources of attention have."""

NO_WINDOW = 2**31 - 1
"""Tokens: no sequence has more, its length being an int32."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class AttentionCall(ctypes.Structure):
    """Mirror of the struct in `csrc/attention.h`."""

    _fields_ = (
        ("q", _PTR),
        ("q_stride", _I64),
        ("pool", _PTR),
        ("block_bytes", _I64),
        ("k_offset", _I64),
        ("v_offset", _I64),
        ("block_size", _I64),
        ("heads", _I64),
        ("kv_heads", _I64),
        ("head_dim", _I64),
        ("block_tables", _PTR),
        ("table_stride", _I64),
        ("query_start", _PTR),
        ("seq_lens", _PTR),
        ("sequences", _I64),
        ("window", _I64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", _PTR),
        ("out", _PTR),
    )


class StoreCall(ctypes.Structure):
    """Mirror of the struct in `csrc/store.cpp`."""

    _fields_ = (
        ("k", _PTR),
        ("v", _PTR),
        ("k_stride", _I64),
        ("v_stride", _I64),
        ("pool", _PTR),
        ("block_bytes", _I64),
        ("k_offset", _I64),
        ("v_offset", _I64),
        ("block_size", _I64),
        ("kv_heads", _I64),
        ("head_dim", _I64),
        ("slots", _PTR),
        ("tokens", _I64),
    )


@dataclass(frozen=True)
class NativeAttention:
    """`paged_attention` by one entry of the library."""

    entry: Callable[..., int]

    def __call__(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, heads, dims = q.shape
        k_part, v_part = (half.codes for half in pages.halves)
        out = q.new_empty(rows, heads * dims)
        call = AttentionCall(
            q.data_ptr(),
            q.stride(0),
            pages.pool.data_ptr(),
            pages.spec.block_bytes,
            k_part.offset,
            v_part.offset,
            pages.spec.block_size,
            heads,
            k_part.shape[0],
            dims,
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            seq_lens.shape[0],
            NO_WINDOW if window is None else window,
            scale,
            softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        if self.entry(call):
            raise MemoryError("no memory for the partial sums of attention")
        return out


@dataclass(frozen=True)
class NativeStore:
    """`store_kv` by the library."""

    entry: Callable[..., None]

    def __call__(self, k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
        tokens, kv_heads, dims = k.shape
        k_part, v_part = (half.codes for half in pages.halves)
        call = StoreCall(
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            v.stride(0),
            pages.pool.data_ptr(),
            pages.spec.block_bytes,
            k_part.offset,
            v_part.offset,
            pages.spec.block_size,
            kv_heads,
            dims,
            slot_mapping.data_ptr(),
            tokens,
        )
        self.entry(call, k.itemsize)


@dataclass(frozen=True)
class NativeCopy:
    """`copy_blocks` by the library."""

    entry: Callable[..., None]

    def __call__(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        flat = [block for pair in pairs for block in pair]
        self.entry(pool.data_ptr(), pool.shape[1], (ctypes.c_int64 * len(flat))(*flat), len(pairs))


def native_store(native: NativeLibrary) -> NativeStore:
    return NativeStore(native.function("store_kv", [ctypes.POINTER(StoreCall), _I64]))


def native_copy(native: NativeLibrary) -> NativeCopy:
    return NativeCopy(native.function("copy_blocks", [_PTR, _I64, ctypes.POINTER(_I64), _I64]))


def native_attention(native: NativeLibrary, ending: str) -> NativeAttention:
    """ending: "bf16_avx2"."""
    return NativeAttention(native.function(f"attention_{ending}", [ctypes.POINTER(AttentionCall)], ctypes.c_int32))


def _candidate(op: str, make: Callable[[NativeLibrary], Callable[..., Any]]) -> Candidate:
    """An op that moves bits: one entry serves all instruction sets and dtypes."""

    def offer(device: str, dtype: torch.dtype) -> Accepted | Refused:
        if device != "cpu":
            return Refused(f"runs on the CPU, not on {device}")
        native = library.load()
        return Refused(library.refusal() or "not loaded") if native is None else Accepted(make(native))

    return Candidate(op, "C++", offer)


CANDIDATES = (
    *native_candidates("paged_attention", "attention", ISAS, native_attention),
    _candidate("store_kv", native_store),
    _candidate("copy_blocks", native_copy),
)
