"""The KV pool and paged attention on the CPU in C++. Contracts: `kernels.ops`.

Sources: `csrc/store.cpp`; `csrc/attention.h` says how a row's result is defined.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from configs.kv import KVSpec
from kernels.cpu import library
from kernels.cpu.library import ISA_TITLES, ISAS, NativeLibrary
from kernels.registry import Accepted, Candidate, Refused

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""What the native attention computes in; its entries carry these names."""

BF16_ONLY = ("avx512bf16", "amx")

Offer = Callable[[str, torch.dtype], Accepted | Refused]

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
        ("scale", ctypes.c_float),
        ("out", _PTR),
        ("threads", _I64),
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
        ("threads", _I64),
    )


@dataclass(frozen=True)
class NativeAttention:
    """`paged_attention` by one entry of the library."""

    entry: Callable[..., int]

    def __call__(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        spec: KVSpec,
        layer: int,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows, heads, dims = q.shape
        k_part, v_part = spec.parts[layer]
        out = q.new_empty(rows, heads * dims)
        call = AttentionCall(
            q.data_ptr(),
            q.stride(0),
            pool.data_ptr(),
            spec.block_bytes,
            k_part.offset,
            v_part.offset,
            spec.block_size,
            heads,
            k_part.shape[0],
            dims,
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            seq_lens.shape[0],
            scale,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if self.entry(call):
            raise MemoryError("no memory for the partial sums of attention")
        return out


@dataclass(frozen=True)
class NativeStore:
    """`store_kv` by the library."""

    entry: Callable[..., None]

    def __call__(
        self, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, spec: KVSpec, layer: int, slot_mapping: torch.Tensor
    ) -> None:
        tokens, kv_heads, dims = k.shape
        k_part, v_part = spec.parts[layer]
        call = StoreCall(
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            v.stride(0),
            pool.data_ptr(),
            spec.block_bytes,
            k_part.offset,
            v_part.offset,
            spec.block_size,
            kv_heads,
            dims,
            slot_mapping.data_ptr(),
            tokens,
            torch.get_num_threads(),
        )
        self.entry(call, k.itemsize)


@dataclass(frozen=True)
class NativeCopy:
    """`copy_blocks` by the library."""

    entry: Callable[..., None]

    def __call__(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        flat = [block for pair in pairs for block in pair]
        self.entry(pool.data_ptr(), pool.shape[1], (ctypes.c_int64 * len(flat))(*flat), len(pairs))


def native_attention(native: NativeLibrary, isa: str, dtype: torch.dtype) -> NativeAttention | Refused:
    """Paged attention in `dtype` compiled for instruction set `isa`, or why this machine has none."""
    if dtype not in KINDS or (dtype is torch.float32 and isa in BF16_ONLY):
        return Refused(f"does not compute in {str(dtype).removeprefix('torch.')}")
    name = f"attention_{KINDS[dtype]}"
    if reason := native.refusal(name, isa):
        return Refused(reason)
    return NativeAttention(native.function(f"{name}_{isa}", [ctypes.POINTER(AttentionCall)], ctypes.c_int32))


def native_store(native: NativeLibrary) -> NativeStore:
    return NativeStore(native.function("store_kv", [ctypes.POINTER(StoreCall), _I64]))


def native_copy(native: NativeLibrary) -> NativeCopy:
    return NativeCopy(native.function("copy_blocks", [_PTR, _I64, ctypes.POINTER(_I64), _I64]))


def _native(device: str) -> NativeLibrary | Refused:
    if device != "cpu":
        return Refused(f"runs on the CPU, not on {device}")
    return library.load() or Refused(library.refusal() or "not loaded")


def _offer_attention(isa: str) -> Offer:
    def offer(device: str, dtype: torch.dtype) -> Accepted | Refused:
        native = _native(device)
        if isinstance(native, Refused):
            return native
        function = native_attention(native, isa, dtype)
        return function if isinstance(function, Refused) else Accepted(function)

    return offer


def _offer_move(make: Callable[[NativeLibrary], Callable[..., Any]]) -> Offer:
    """For entries that move bits, whatever these mean."""

    def offer(device: str, dtype: torch.dtype) -> Accepted | Refused:
        native = _native(device)
        return native if isinstance(native, Refused) else Accepted(make(native))

    return offer


CANDIDATES = (
    *(Candidate("paged_attention", f"C++ {ISA_TITLES[isa]}", _offer_attention(isa)) for isa in reversed(ISAS)),
    Candidate("store_kv", "C++", _offer_move(native_store)),
    Candidate("copy_blocks", "C++", _offer_move(native_copy)),
)
