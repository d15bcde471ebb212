"""Paged attention on the CPU in C++; `csrc/attention.h` says how a row's result is defined. Contract: `kernels.ops`."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from configs.kv import KVFormat, KVHalf, KVOrder
from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import KINDS, native_candidates
from kernels.cpu.program import Call, Entry, fresh
from kernels.cpu.store import FORMATS, address, address_of_signs
from kernels.ops import KVTransform, LayerPages, compute_dtype
from kernels.registry import KVFormats

ISAS = {
    torch.float32: ("baseline", "avx2", "avx512"),
    torch.bfloat16: ("baseline", "avx2", "avx512", "avx512bf16", "amx"),
}
"""Instruction sets that the sources of attention have, by the dtype in which it multiplies."""

NUMBERS = {torch.float32: FORMATS[KVFormat.FP32], torch.bfloat16: FORMATS[KVFormat.BF16]}
"""How C++ is told a tensor's dtype."""

NO_WINDOW = 2**31 - 1
"""Tokens: no sequence has more, its length being an int32."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class AttentionHalf(ctypes.Structure):
    """Mirror of the struct in `csrc/attention_pages.h`."""

    _fields_ = (
        ("format", _I64),
        ("codes", _I64),
        ("scales", _I64),
        ("zeros", _I64),
        ("signs", _PTR),
        ("channels", _PTR),
    )


class AttentionCall(Call):
    """Mirror of the struct in `csrc/attention_pages.h`."""

    rows_ = "sequences"
    _fields_ = (
        ("q", _PTR),
        ("numbers", _I64),
        ("q_stride", _I64),
        ("pool", _PTR),
        ("block_bytes", _I64),
        ("k", AttentionHalf),
        ("v", AttentionHalf),
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


@dataclass(frozen=True)
class NativeAttention:
    """`paged_attention` by entries of the library."""

    entries: Mapping[torch.dtype, Entry]
    """By the dtype in which they multiply (`ops.compute_dtype`)."""
    _known: WeakKeyDictionary[LayerPages, tuple[AttentionHalf, AttentionHalf]] = field(
        default_factory=WeakKeyDictionary
    )
    """What C++ needs to know of pages' halves, made once."""

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
        kind, known = pages.kind, self._known.get(pages)
        if known is None:
            known = self._known[pages] = describe(pages)
        out = fresh((rows, heads * dims), q.dtype)
        call = AttentionCall(
            q.data_ptr(),
            NUMBERS[q.dtype],
            q.stride(0),
            pages.pool.data_ptr(),
            pages.spec.block_bytes,
            *known,
            pages.spec.block_size,
            heads,
            kind.kv_heads,
            dims,
            block_tables.data_ptr(),
            block_tables.stride(0),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            seq_lens.shape[0],
            NO_WINDOW if window is None else window,
            scale,
            softcap or 0.0,
            address(sinks),
            out.data_ptr(),
        )
        self.entries[compute_dtype(q.dtype, kind.formats)](call)
        return out


def describe(pages: LayerPages) -> tuple[AttentionHalf, AttentionHalf]:
    """(K, V)"""
    assert pages.spec.order is KVOrder.PAIRED, pages.spec.order
    k, v = (_half(pages, half, transform) for half, transform in zip(pages.halves, pages.transforms, strict=True))
    return k, v


def _half(pages: LayerPages, half: KVHalf, transform: KVTransform) -> AttentionHalf:
    return AttentionHalf(
        FORMATS[half.format],
        half.codes.offset,
        -1 if half.scales is None else half.scales.offset,
        -1 if half.zeros is None else half.zeros.offset,
        address_of_signs(pages, half),
        address(transform.channels),
    )


def native_attention(native: NativeLibrary, ending: str) -> NativeAttention:
    """ending: "bf16_avx2", the dtype of q and out, and the instruction set of the entries."""
    kind, isa = ending.split("_")
    needed = [dtype for dtype, name in KINDS.items() if isa in ISAS[dtype] and name in (kind, KINDS[torch.float32])]
    return NativeAttention({dtype: Entry(native, f"attention_{KINDS[dtype]}_{isa}") for dtype in needed})


def refuses_pages(isa: str, dtype: torch.dtype, formats: KVFormats) -> str | None:
    """Why an instruction set cannot serve pages of these formats, or None."""
    if isa in ISAS[compute_dtype(dtype, formats)]:
        return None
    return "multiplies bf16, which cannot hold what these pages do"


CANDIDATES = native_candidates("paged_attention", "attention", ISAS, native_attention, refuses_pages)
