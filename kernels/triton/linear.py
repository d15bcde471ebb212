"""Linear layers that give a row the same bits whatever the number of rows. Contract: `kernels.ops`.

A library has a kernel for each number of rows, and each kernel an order in which it adds. Here the order belongs to the
weight: inputs are taken in `parts`, as many as its shape says; a part's products are added one after the other, from
its first input on; then the parts are added in order. How many rows there are decides only who computes what:

    parts are folded    a program has one tile of outputs and rows, and takes one part after the other
    parts are apart     a program has one part of a tile; `_merge` adds what they found. Few rows leave most of a GPU
                        idle otherwise, where there are few outputs

A tile is outputs x rows, out^T = weight x^T, since the units that multiply matrices want 64 of the first and are
content with few of the second: so one instruction serves all numbers of rows, 64 outputs x n rows x 16 inputs. What
is assumed of it is that n does not change an element's bits. Nothing documents that: `tests/gpu` asks, and so does the
engine at its start.

A weight in int8 is widened inside the tile: each code is a number of every dtype.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import ops
from kernels.int8_weight import Int8Weight
from kernels.ops import Gate
from kernels.triton.codes import INTERPRETED, narrowed, widened
from kernels.triton.device import PLAIN, shared_bytes_of
from kernels.triton.elementwise import gate_mul

DEPTH_BYTES = 128
"""Of inputs that a program loads at a time, for each row: what memory likes to be asked for."""
OUTPUTS = 64
"""Fewest outputs of a tile."""
PROGRAMS = 64
"""With so many, each with its own part of the weight, a GPU reads it as fast as it can."""
PART = 256
"""Fewest inputs of a part."""
FULL = 96
"""Programs that occupy a GPU with products."""
FOLDED_ROWS = 64
"""Fewest rows of a tile in which parts are folded."""
LARGEST = {2: 256 * 128, 4: 64 * 64}
"""Bytes of a number of x -> rows x outputs of a tile whose sums find registers."""
LARGEST_OF_TWO = 128 * 128
"""Where a program also holds sums of earlier parts, or a weight's numbers beside its codes."""
TOGETHER = 16
"""Tiles of rows whose programs run side by side: they share the weight's tiles, and those the rows', in cache."""
MERGED = 1024
"""Outputs that a program merges."""


@dataclass(frozen=True)
class Tile:
    """What a program computes. Sums of rows do not depend on it."""

    rows: int
    outputs: int
    warps: int
    stages: int
    """Loads on their way, and the one that is computed."""

    @property
    def shared_bytes(self) -> int:
        return (self.rows + self.outputs) * DEPTH_BYTES * self.stages + 1024

    def count(self, rows: int, outputs: int) -> int:
        """How many there are."""
        return -(-rows // self.rows) * -(-outputs // self.outputs)


TILES = (
    Tile(256, 128, 8, 4),
    Tile(256, 128, 8, 3),
    Tile(128, 128, 8, 3),
    Tile(128, 64, 4, 4),
    Tile(64, 64, 4, 4),
    Tile(32, 64, 4, 5),
    Tile(16, 64, 4, 6),
)
"""Those that read least first."""


@functools.cache
def parts_of(outputs: int, inputs: int, depth: int) -> tuple[int, int]:
    """(parts that a weight's inputs are taken in, inputs of each but the last). A property of the weight's shape: the
    same for all numbers of rows, and on all GPUs."""
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS, triton.cdiv(outputs, OUTPUTS)))
    wanted = max(1, min(wanted, inputs // PART))
    span = triton.cdiv(triton.cdiv(inputs, wanted), depth) * depth
    return max(1, triton.cdiv(inputs, span)), span


@functools.cache
def tile_of(rows: int, outputs: int, parts: int, largest: int, room: int) -> tuple[Tile, bool]:
    """(the tile, whether parts are apart). largest: rows x outputs; room: of shared memory, for a program."""
    fit = [tile for tile in TILES if tile.rows * tile.outputs <= largest and tile.shared_bytes <= room]
    fit = [tile for tile in fit if tile.rows < max(17, 2 * rows)]
    for tile in fit:
        if tile.count(rows, outputs) >= FULL and (parts == 1 or tile.rows >= FOLDED_ROWS):
            return tile, False
    for tile in fit:
        if tile.count(rows, outputs) * parts >= FULL:
            return tile, parts > 1
    return fit[-1], parts > 1


# ------------------------------------------------------------------ kernels
@triton.jit
def _operand(x: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """What `tl.dot` multiplies: x, or whole numbers, in NUMBER; in the interpreter fp32."""
    if INTERPRETED:
        y = widened(x)
    else:
        y = x.to(NUMBER)
    return y


@triton.jit
def _store(
    sums: tl.tensor,
    to: tl.tensor,
    there: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
) -> None:
    """fp32 sums of outputs `output`: scaled, where there are scales, and rounded to the dtype at `to`."""
    inside = output < outputs
    if scales is not None:
        scale = tl.load(scales + output, inside, other=0.0)
        if bias is not None:
            sums = tl.fma(sums, scale, widened(tl.load(bias + output, inside, other=0.0)))
        else:
            sums = sums * scale
    elif bias is not None:
        sums += widened(tl.load(bias + output, inside, other=0.0))
    tl.store(to, narrowed(sums, to.dtype.element_ty), there)


@triton.jit(do_not_specialize=["rows", "parts"])
def _multiply(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    parts: tl.tensor,
    span: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    FOLDS: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Grid: (tiles, parts that are apart). out: [parts that are apart, rows, outputs]. EVEN: DEPTH divides the inputs.

    Rows and outputs that there are not read the last one, and are not stored.
    """
    row_tiles, output_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    first = tl.program_id(0) // (TOGETHER * output_tiles) * TOGETHER
    beside = tl.minimum(row_tiles - first, TOGETHER)
    place = tl.program_id(0) % (TOGETHER * output_tiles)
    row = (first + place % beside) * ROWS + tl.arange(0, ROWS)[None, :]
    output = place // beside * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    x += tl.minimum(row, rows - 1).to(tl.int64) * x_stride
    weight += tl.minimum(output, outputs - 1).to(tl.int64) * inputs
    at = tl.arange(0, DEPTH)

    part, end = tl.program_id(1), tl.program_id(1) + 1
    if FOLDS:
        part, end = 0, parts
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for each in tl.range(part, end, num_stages=1):
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for start in range(each * span, tl.minimum(each * span + span, inputs), DEPTH):
            if EVEN:
                a = tl.load(weight + (start + at)[None, :])
                b = tl.load(x + (start + at)[:, None])
            else:
                there = start + at < inputs
                a = tl.load(weight + (start + at)[None, :], there[None, :], other=0)
                b = tl.load(x + (start + at)[:, None], there[:, None], other=0.0)
            a, b = _operand(a, x.dtype.element_ty), _operand(b, x.dtype.element_ty)
            sums = tl.dot(a, b, sums, input_precision="tf32x3")
        total += sums
    line = tl.program_id(1).to(tl.int64) * rows + row
    _store(total, out + line * outputs + output, (output < outputs) & (row < rows), output, outputs, scales, bias)


@triton.jit(do_not_specialize=["rows", "parts"])
def _merge(
    sums: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    parts: tl.tensor,
    OUTPUTS: tl.constexpr,
) -> None:
    """Grid: (rows, tiles of outputs). sums: fp32 [parts, rows, outputs]"""
    row, output = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros([OUTPUTS], tl.float32)
    for part in range(parts):
        at = (part * rows + row).to(tl.int64) * outputs + output
        total += tl.load(sums + at, output < outputs, other=0.0)
    _store(total, out + row.to(tl.int64) * outputs + output, output < outputs, output, outputs, scales, bias)


# ------------------------------------------------------------------ layers
@dataclass(frozen=True, eq=False)
class TritonLinear:
    """The weight as it is, in numbers or in int8."""

    weight: torch.Tensor
    """[N, K], contiguous"""
    scales: torch.Tensor | None
    """Of codes, fp32 [N]"""
    bias: torch.Tensor | None
    gate: Gate | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // 2 if self.gate else self.weight.shape[0]

    def __call__(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        assert not (wide and self.gate), ops.GATED_IS_NOT_WIDE
        out = torch.empty((len(x), len(self.weight)), dtype=torch.float32 if wide else x.dtype, device=x.device)
        self._multiply(x, out)
        return gate_mul(out, self.gate) if self.gate else out

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        (rows, outputs), inputs = out.shape, self.in_features
        depth = DEPTH_BYTES // x.element_size()
        parts, span = parts_of(outputs, inputs, depth)
        largest = LARGEST[x.element_size()]
        if parts > 1 or self.scales is not None:
            largest = min(largest, LARGEST_OF_TWO)
        tile, apart = tile_of(rows, outputs, parts, largest, shared_bytes_of(x.device))
        found, last = out, (self.scales, self.bias)
        if apart:
            found = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
            last = None, None
        _multiply[tile.count(rows, outputs), parts if apart else 1](
            x, x.stride(0), self.weight, *last, found, rows, outputs, inputs, parts, span,
            ROWS=tile.rows, OUTPUTS=tile.outputs, DEPTH=depth, EVEN=inputs % depth == 0,
            FOLDS=parts > 1 and not apart, TOGETHER=TOGETHER,
            num_warps=tile.warps, num_stages=tile.stages, **PLAIN,
        )  # fmt: skip
        if apart:
            _merge[rows, triton.cdiv(outputs, MERGED)](
                found, self.scales, self.bias, out, rows, outputs, parts, OUTPUTS=MERGED, num_warps=4, **PLAIN
            )


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate | None = None) -> TritonLinear:
    return TritonLinear(weight.contiguous(), None, bias, gate)


def pack_coded_linear(
    weight: ops.CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, gate: Gate | None = None
) -> TritonLinear:
    """Codes in groups are unpacked."""
    if isinstance(weight, Int8Weight):
        return TritonLinear(weight.codes.contiguous(), weight.scales.contiguous(), bias, gate)
    return pack_linear(weight.widened().to(dtype), bias, gate)
