"""Packed linear layers for tests: their shapes and instruction sets, and how near a product is to the exact one."""

from collections.abc import Callable
from typing import TypeVar, get_args

import pytest
import torch

from kernels import ops
from kernels.cpu import library
from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import ISAS
from kernels.cpu.offers import KINDS

SHAPES = [(1536, 576), (64, 300), (33, 70), (2048, 64), (1, 1)]
"""(K, N): of a real model; of no round number; rows a multiple of 4 KiB apart."""
VARIANTS = [(dtype, isa) for dtype in ISAS for isa in ISAS[dtype]]
GATES = get_args(ops.Gate)

Packer = TypeVar("Packer")


def packer(kind: Callable[[NativeLibrary, str], Packer], dtype: torch.dtype, isa: str) -> Packer:
    """The library's packer of this kind; skips the test where this machine cannot run what it packs for."""
    native = library.load()
    if native is None:
        pytest.skip(f"no native library: {library.refusal()}")
    if reason := native.refusal(f"linear_{KINDS[dtype]}", isa):
        pytest.skip(reason)
    return kind(native, f"{KINDS[dtype]}_{isa}")


def assert_close(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Within what fp32 sums and one rounding may lose."""
    weight = weight.double()
    exact = x.double() @ weight.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.abs().T + 1
    rounding = exact.abs() * 2.0**-8 if out.dtype is torch.bfloat16 else 0
    error = (out.double() - exact).abs()
    assert (error <= rounding + size * 2.0**-20).all(), error.max()


def by_row(x: torch.Tensor, packed: ops.PackedLinear, wide: bool = False) -> torch.Tensor:
    """`ops.linear`, one row at a time: exact on every CPU."""
    return torch.cat([packed(row, wide) for row in x.split(1)])
