"""Writing the KV pool and copying its blocks on the CPU in C++. Contracts: `kernels.ops`; sources: `csrc/store.h`,
`csrc/copy.cpp`; formulas: `kernels.reference.kv_formats`."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from configs.kv import KVFormat, KVHalf, KVOrder
from kernels.cpu import library
from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import native_candidates
from kernels.cpu.program import Call, Entry
from kernels.ops import LayerPages
from kernels.reference import kv_formats
from kernels.registry import Accepted, Candidate, Refused

ISAS = dict.fromkeys((torch.float32, torch.bfloat16), ("baseline", "avx2", "avx512"))
"""Instruction sets that the sources of `store_kv` have."""

FORMATS = {format: number for number, format in enumerate(KVFormat)}
"""As in `csrc/kv_format.h`."""

CPU = torch.device("cpu")
_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class StoreHalf(ctypes.Structure):
    """Mirror of the struct in `csrc/store.h`."""

    _fields_ = (
        ("format", _I64),
        ("codes", _I64),
        ("scales", _I64),
        ("zeros", _I64),
        ("centre", _PTR),
        ("channels", _PTR),
        ("signs", _PTR),
        ("feedback", _PTR),
    )


class StorePages(ctypes.Structure):
    """Mirror of the struct in `csrc/store.h`."""

    _fields_ = (
        ("k", StoreHalf),
        ("v", StoreHalf),
        ("pool", _PTR),
        ("block_bytes", _I64),
        ("block_size", _I64),
        ("kv_heads", _I64),
        ("head_dim", _I64),
    )


class StoreRows(Call):
    """Mirror of the struct in `csrc/store.h`."""

    rows_ = "tokens"
    _fields_ = (
        ("pages", _PTR),
        ("k", _PTR),
        ("v", _PTR),
        ("k_stride", _I64),
        ("v_stride", _I64),
        ("slots", _PTR),
        ("tokens", _I64),
    )


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def address_of_signs(pages: LayerPages, half: KVHalf) -> int | None:
    """Of the rotation, where there is one. They are kept for good."""
    kind = pages.kind
    return kv_formats.signs(kind.head_dim, CPU).data_ptr() if kind.is_rotated(half.format) else None


@dataclass(frozen=True)
class NativeStore:
    """`store_kv` by one entry of the library."""

    entry: Entry
    _known: WeakKeyDictionary[LayerPages, StorePages] = field(default_factory=WeakKeyDictionary)
    """What C++ needs to know of pages, made once."""

    def __call__(self, k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
        known = self._known.get(pages)
        if known is None:
            known = self._known[pages] = describe(pages)
        # fmt: off
        self.entry(StoreRows(
            ctypes.addressof(known), k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), slot_mapping.data_ptr(),
            slot_mapping.shape[0],
        ))
        # fmt: on


def describe(pages: LayerPages) -> StorePages:
    kind = pages.kind
    halves = [
        StoreHalf(
            FORMATS[half.format],
            half.codes.offset,
            -1 if half.scales is None else half.scales.offset,
            -1 if half.zeros is None else half.zeros.offset,
            address(transform.centre),
            address(transform.channels),
            address_of_signs(pages, half),
            address(transform.feedback),
        )
        for half, transform in zip(pages.halves, pages.transforms, strict=True)
    ]
    spec = pages.spec
    assert spec.order is KVOrder.PAIRED, spec.order
    return StorePages(*halves, pages.pool.data_ptr(), spec.block_bytes, spec.block_size, kind.kv_heads, kind.head_dim)


@dataclass(frozen=True)
class NativeCopy:
    """`copy_blocks` by the library."""

    entry: Callable[..., None]

    def __call__(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        flat = [block for pair in pairs for block in pair]
        self.entry(pool.data_ptr(), pool.shape[1], (ctypes.c_int64 * len(flat))(*flat), len(pairs))


def native_store(native: NativeLibrary, ending: str) -> NativeStore:
    """ending: "bf16_avx2"."""
    return NativeStore(Entry(native, f"store_kv_{ending}"))


def native_copy(native: NativeLibrary) -> NativeCopy:
    return NativeCopy(native.function("copy_blocks", [_PTR, _I64, ctypes.POINTER(_I64), _I64]))


def _offer_copy(device: str, dtype: torch.dtype) -> Accepted | Refused:
    """Bits move: one entry serves all instruction sets and dtypes."""
    native = library.load()
    return Refused(library.refusal() or "not loaded") if native is None else Accepted(native_copy(native))


CANDIDATES = (
    *native_candidates("store_kv", "store_kv", ISAS, native_store),
    Candidate("copy_blocks", "C++", _offer_copy, device="cpu"),
)
