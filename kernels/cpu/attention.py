"""Paged attention on the CPU in C++; `csrc/attention.h` says how a row's result is defined. Contract: `kernels.ops`."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.kv import KVFormat
from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import native_candidates
from kernels.ops import LayerPages
from kernels.registry import KVFormats

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


def native_attention(native: NativeLibrary, ending: str) -> NativeAttention:
    """ending: "bf16_avx2"."""
    return NativeAttention(native.function(f"attention_{ending}", [ctypes.POINTER(AttentionCall)], ctypes.c_int32))


def refuses_pages(dtype: torch.dtype, formats: KVFormats) -> str | None:
    """Why attention here cannot read pages of these formats, or None."""
    plain = {torch.float32: KVFormat.FP32, torch.bfloat16: KVFormat.BF16}[dtype]
    return None if formats == (plain, plain) else f"reads pages in {plain.value} only"


CANDIDATES = native_candidates("paged_attention", "attention", ISAS, native_attention, refuses_pages)
