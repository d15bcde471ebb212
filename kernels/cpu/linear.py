"""Linear layers on the CPU: our own C++ (`csrc/linear.h`), else oneDNN. Contracts: `kernels.ops`.

Every output is one chain of products over ascending input dims, so a row's bits do not depend on its company. Weights
are laid out once, one at a time, in huge pages: a step with few rows is spent on reading weights, and with small pages
on translating their addresses too. A packed weight is a copy: an embedding that is tied with the head exists twice from
then on.
"""

import ctypes
import mmap
from dataclasses import dataclass

import torch

from kernels import ops
from kernels.cpu.elementwise import GATES
from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import native_candidates
from kernels.cpu.program import Call, Entry, fresh
from kernels.grouped_weight import GroupedWeight
from kernels.int8_weight import Int8Weight
from kernels.registry import Accepted, Candidate, Refused

ISAS = {
    torch.float32: ("baseline", "avx2", "avx512"),
    torch.bfloat16: ("baseline", "avx2", "avx512", "avx512bf16", "amx"),
}
"""Instruction sets that the sources have."""

PAIRED = ("bf16_avx512bf16", "bf16_amx")
"""Endings of entries that take codes in pairs, as `csrc/linear_codes.h` says."""

BLOCK = 32
"""Outputs of a block of the packed weight, as in `csrc/linear.h`."""

HUGE_PAGE = 2 << 20

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class LinearWeight(ctypes.Structure):
    """Mirror of the struct in `csrc/linear.h`."""

    _fields_ = (
        *(("units", _PTR), ("codes", _PTR), ("scales", _PTR), ("bias", _PTR)),
        *(("n", _I64), ("k", _I64), ("depth", _I64), ("gate", _I64)),
        *(("group", _I64), ("bits", _I64), ("lowest", _I64), ("scale_bytes", _I64), ("minimums", _I64)),
        ("paired", _I64),
    )


class LinearCall(Call):
    """Mirror of the struct in `csrc/linear.h`."""

    rows_ = "rows"
    _fields_ = (("weight", _PTR), ("x", _PTR), ("x_stride", _I64), ("rows", _I64), ("y", _PTR), ("wide", _I64))


class WeightMemory:
    """Hands out memory for weights from huge pages. A chunk lives as long as a tensor that it was given to."""

    CHUNK = 64 << 20

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], 64-byte aligned, contents undefined."""
        if size > self._chunk.numel():
            self._chunk = self._map(max(size, self.CHUNK))
        taken, self._chunk = self._chunk[:size], self._chunk[_align(size, 64) :]
        return taken

    def _map(self, size: int) -> torch.Tensor:
        mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        return memory[-memory.data_ptr() % HUGE_PAGE :]


class NativeLinear:
    """A weight laid out for one entry of the library. A `kernels.ops.PackedLinear`."""

    def __init__(self, entry: Entry, layout: LinearWeight, dtype: torch.dtype, *kept: torch.Tensor | None) -> None:
        """kept: what `layout` points to."""
        self.in_features: int = layout.k
        self.out_features: int = layout.n
        self.dtype = dtype
        self.is_gated = bool(layout.gate)
        self._entry = entry
        self._keep = layout, kept
        self._weight = ctypes.addressof(layout)

    def __call__(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        """x: [T, in_features], any row stride -> [T, out_features]."""
        assert x.dtype is self.dtype and x.is_cpu, (x.dtype, self.dtype, x.device)
        assert not (wide and self.is_gated), ops.GATED_IS_NOT_WIDE
        rows = x.shape[0]
        out = fresh((rows, self.out_features), torch.float32 if wide else x.dtype)
        self._entry(LinearCall(self._weight, x.data_ptr(), x.stride(0), rows, out.data_ptr(), wide))
        return out


class NativePacker:
    """`pack_linear` for one instruction set and dtype. Keeps the memory that weights are put in."""

    def __init__(self, native: NativeLibrary, ending: str) -> None:
        self._pack = native.function("pack_linear", (_PTR, _I64, _I64, _I64, _I64, _I64, _PTR))
        self._entry = Entry(native, f"linear_{ending}")
        self._memory = WeightMemory()

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gate: ops.Gate | None = None
    ) -> NativeLinear:
        outputs = weight.shape[0] // 2 if gate else weight.shape[0]
        rows = rows_to_pack(weight, gate)
        (columns, k), itemsize = rows.shape, rows.itemsize
        depth = depth_of(k, weight.dtype)
        units = self._memory.take(_align(columns, BLOCK) * depth * 4)
        self._pack(rows.data_ptr(), rows.stride(0) * itemsize, itemsize, columns, k, depth, units.data_ptr())
        wide = None if bias is None else per_column(bias, gate)
        # fmt: off
        layout = LinearWeight(
            units=units.data_ptr(), bias=_pointer(wide), n=outputs, k=k, depth=depth, gate=GATES[gate] if gate else 0,
        )
        # fmt: on
        return NativeLinear(self._entry, layout, weight.dtype, units, wide)


class NativeCodePacker:
    """`pack_coded_linear` for one instruction set and dtype. Keeps the memory that weights are put in."""

    def __init__(self, native: NativeLibrary, ending: str) -> None:
        self._pack = native.function("pack_linear_int8", (_PTR, _I64, _I64, _I64, _I64, _PTR))
        self._pack_groups = native.function("pack_linear_groups", (_PTR, _PTR, _I64, _PTR, _PTR, _I64, _PTR))
        self._entry = Entry(native, f"linear_{ending}")
        self._paired = ending in PAIRED
        self._memory = WeightMemory()

    def __call__(
        self,
        weight: ops.CodedWeight,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        gate: ops.Gate | None = None,
    ) -> NativeLinear:
        (columns, k), wide = weight.codes.shape, None if bias is None else per_column(bias, gate)
        layout = LinearWeight(
            bias=_pointer(wide),
            n=columns // 2 if gate else columns,
            k=k,
            depth=depth_of(k, dtype),
            gate=GATES[gate] if gate else 0,
        )
        if isinstance(weight, GroupedWeight):
            return NativeLinear(self._entry, layout, dtype, self._groups(weight, layout, gate), wide)
        scales = per_column(weight.scales, gate)
        layout.scales = scales.data_ptr()
        return NativeLinear(self._entry, layout, dtype, self._int8(weight, layout, dtype, gate), scales, wide)

    def _int8(
        self, weight: Int8Weight, layout: LinearWeight, dtype: torch.dtype, gate: ops.Gate | None
    ) -> torch.Tensor:
        rows = rows_to_pack(weight.codes, gate)
        columns, k = rows.shape
        dims = layout.depth * (4 // dtype.itemsize)
        codes = self._memory.take(_align(columns, BLOCK) * dims)
        self._pack(rows.data_ptr(), rows.stride(0), columns, k, dims, codes.data_ptr())
        layout.codes = codes.data_ptr()
        return codes

    def _groups(self, weight: GroupedWeight, layout: LinearWeight, gate: ops.Gate | None) -> torch.Tensor:
        rows, scales = rows_to_pack(weight.codes, gate), rows_to_pack(weight.scales, gate).contiguous()
        minimums = None if weight.minimums is None else rows_to_pack(weight.minimums, gate).contiguous()
        layout.group, layout.bits, layout.lowest = weight.group, weight.bits, weight.lowest
        layout.scale_bytes, layout.minimums = scales.itemsize, minimums is not None
        layout.paired = self._paired
        columns, k = rows.shape
        size = scales.itemsize * (1 + layout.minimums) + weight.group * weight.bits // 8  # of a group and column
        codes = self._memory.take(_align(columns, BLOCK) * (k // weight.group) * size)
        given = rows.data_ptr(), rows.stride(0), scales.data_ptr(), _pointer(minimums)
        self._pack_groups(ctypes.addressof(layout), *given, columns, codes.data_ptr())
        layout.codes = codes.data_ptr()
        return codes


def rows_to_pack(weight: torch.Tensor, gate: ops.Gate | None) -> torch.Tensor:
    """A row for each column of the packed weight, dense inside."""
    if gate:
        return side_by_side(weight)
    return weight if weight.stride(1) == 1 else weight.contiguous()


def per_column(numbers: torch.Tensor, gate: ops.Gate | None) -> torch.Tensor:
    """[outputs] -> fp32, one a column of the packed weight's blocks; zeros behind the last."""
    numbers = side_by_side(numbers) if gate else numbers
    wide = torch.zeros(_align(len(numbers), BLOCK))
    wide[: len(numbers)] = numbers
    return wide


def depth_of(inputs: int, dtype: torch.dtype) -> int:
    """Units of a column of the packed weight."""
    return inputs if dtype.itemsize == 4 else _align(inputs, 32) // 2


def side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Rows of gates, then rows of what they gate -> blocks of 16 gates and their 16 others; zeros to fill the last."""
    n, rest = rows.shape[0] // 2, rows.shape[1:]
    halves = rows.new_zeros((2, _align(n, BLOCK // 2), *rest))
    halves[:, :n] = rows.reshape(2, n, *rest)
    return halves.view(2, -1, BLOCK // 2, *rest).transpose(0, 1).reshape(-1, *rest)


@dataclass(frozen=True)
class OneDnnLinear:
    """A weight laid out by oneDNN. A `kernels.ops.PackedLinear`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    gate: ops.Gate | None
    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features]. A single row would take another path than several do."""
        assert not (wide and self.gate), ops.GATED_IS_NOT_WIDE
        rows = x.shape[0]
        out = self._multiply(x.expand(2, -1).contiguous() if rows == 1 else x.contiguous())[:rows]
        out = ops.gate_mul(out, self.gate) if self.gate else out
        return out.float() if wide else out

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def pack_onednn(weight: torch.Tensor, bias: torch.Tensor | None = None, gate: ops.Gate | None = None) -> OneDnnLinear:
    """`pack_linear` by oneDNN."""
    n, k = weight.shape
    if weight.dtype is torch.bfloat16:
        keep_onednn_from_amx()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 256)
    else:
        packed = weight.contiguous().to_mkldnn()
    return OneDnnLinear(packed, bias, gate, k, n // 2 if gate else n)


def keep_onednn_from_amx() -> None:
    """Has oneDNN stop at AVX-512 bf16, unless the user set its limit: with AMX rows depend on their number.

    Works only before this process's first use of oneDNN, which reads the setting then and never again. Whether rows are
    exact is for `kernels.exactness` to say.
    """
    ctypes.CDLL(None).setenv(b"ONEDNN_MAX_CPU_ISA", b"AVX512_CORE_BF16", 0)


def _offer_onednn(device: str, dtype: torch.dtype) -> Accepted | Refused:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return Refused("this torch was built without oneDNN")
    keep_onednn_from_amx()  # before the next question but one: it is a use of oneDNN already
    if dtype is torch.float32:
        return Accepted(pack_onednn)
    if dtype is not torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Refused(f"does not compute in {str(dtype).removeprefix('torch.')} on this CPU")
    return Accepted(pack_onednn)


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


CANDIDATES = (
    *native_candidates("pack_linear", "linear", ISAS, NativePacker),
    Candidate("pack_linear", "oneDNN", _offer_onednn, device="cpu"),
    *native_candidates("pack_coded_linear", "linear", ISAS, NativeCodePacker),
)
