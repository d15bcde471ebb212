"""Packed linear layers: right, and the same bits for a row whatever surrounds it."""

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import GATES, SHAPES, VARIANTS, assert_close, packer

from kernels import ops
from kernels.cpu import elementwise, library
from kernels.cpu.library import ISA_TITLES
from kernels.cpu.linear import ISAS, NativePacker, OneDnnLinear, WeightMemory, pack_onednn
from kernels.int8_weight import Int8Weight
from kernels.reference import linear as reference
from kernels.registry import Accepted, choose
from kernels.threads import set_threads

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("threads")
"""Which puts their number back."""


def gate_mul(dtype: torch.dtype, isa: str) -> Callable[[torch.Tensor, ops.Gate], torch.Tensor]:
    """As compiled for `isa`; for AMX, which it has no use for, as for the set below."""
    isa = "avx512bf16" if isa == "amx" else isa
    [candidate] = [c for c in elementwise.CANDIDATES if c.op == "gate_mul" and c.name == f"C++ {ISA_TITLES[isa]}"]
    offer = candidate.offer("cpu", dtype)
    assert isinstance(offer, Accepted)
    return offer.function


def tensors(k: int, n: int, dtype: torch.dtype, rows: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x whose rows are further apart than they are long, weight, bias."""
    generator = torch.Generator().manual_seed(k * n)
    x = torch.randn(rows, k + 7, generator=generator).to(dtype)[:, :k]
    weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype)
    return x, weight, torch.randn(n, generator=generator).to(dtype)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_right(dtype: torch.dtype, isa: str, k: int, n: int, with_bias: bool) -> None:
    x, weight, bias = tensors(k, n, dtype)
    packed = packer(NativePacker, dtype, isa)(weight, bias if with_bias else None)
    assert (packed.in_features, packed.out_features) == (k, n)
    out = ops.linear(x, packed)
    assert out.dtype is dtype and out.shape == (300, n)
    assert_close(out, x, weight, bias if with_bias else None)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize(("k", "n"), [(576, 300), (65, 200)])
def test_rows_are_the_same_bits_in_any_company(dtype: torch.dtype, isa: str, k: int, n: int) -> None:
    x, weight, bias = tensors(k, n, dtype)
    packed = packer(NativePacker, dtype, isa)(weight, bias)
    together = packed(x)
    for threads, counts in (
        (1, (*range(1, 35), 63, 64, 65, 128, 129, 257, 300)),
        (2, (1, 7, 33, 70, 300)),
        (3, (1, 40)),
    ):
        set_threads(threads)
        for rows in counts:
            start = rows * 37 % (301 - rows)
            out = packed(x[start : start + rows])
            assert torch.equal(out, together[start : start + rows]), (threads, rows)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("n", [48, 50, 5, 1])
@pytest.mark.parametrize("gate", GATES)
def test_gated_is_linear_and_gate_mul_in_the_same_bits(dtype: torch.dtype, isa: str, n: int, gate: ops.Gate) -> None:
    x, weight, bias = tensors(96, 2 * n, dtype, 70)
    pack = packer(NativePacker, dtype, isa)
    for some_bias in (None, bias):
        gated, plain = pack(weight, some_bias, gate), pack(weight, some_bias)
        assert (gated.in_features, gated.out_features) == (96, n)
        expected = gate_mul(dtype, isa)(plain(x), gate)
        for rows in (1, 15, 16, 17, 33, 70):
            assert torch.equal(gated(x[:rows]), expected[:rows]), rows


def test_rows_keep_their_bits_when_shuffled() -> None:
    x, weight, _ = tensors(576, 300, torch.float32)
    packed = ops.pack_linear(weight)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(packed(x[order]), packed(x)[order])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(1, 100), st.integers(0, 70), st.booleans(), st.sampled_from(list(ISAS)))
def test_any_shape(k: int, n: int, rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(k, n, dtype, rows)
    out = ops.linear(x, ops.pack_linear(weight, bias if with_bias else None))
    assert_close(out, x, weight, bias if with_bias else None)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 30])
def test_padding_is_never_multiplied(dtype: torch.dtype, isa: str, rows: int) -> None:
    """Beside and below the rows lies NaN, which times a zero of the padded weight would be NaN."""
    buffer = torch.full((40, 50), torch.nan, dtype=dtype)
    x = buffer[5 : 5 + rows, 3:36]
    x.copy_(torch.randn(rows, 33))
    packed = packer(NativePacker, dtype, isa)(torch.randn(9, 33).to(dtype))
    assert packed(x).isfinite().all()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mprotect"), reason="no pages can be forbidden here")
@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 17, 32, 33, 514, 530])
def test_nothing_behind_the_last_row_is_read(dtype: torch.dtype, isa: str, rows: int) -> None:
    """The page behind it is forbidden: reading it ends the process."""
    k, page = 96, mmap.PAGESIZE
    size = -(-rows * k * dtype.itemsize // page) * page
    memory = mmap.mmap(-1, size + page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = size - rows * k * dtype.itemsize
    x = whole[start:size].view(dtype).view(rows, k).normal_(generator=torch.Generator().manual_seed(0))
    weight = torch.ones(32, k, dtype=dtype)
    packed, mprotect = packer(NativePacker, dtype, isa)(weight), ctypes.CDLL(None).mprotect
    mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert mprotect(whole.data_ptr() + size, page, 0) == 0
    try:
        assert_close(packed(x), x, weight, None)
    finally:
        mprotect(whole.data_ptr() + size, page, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize(("k", "n"), [(576, 300), (65, 50)])
def test_wide_results_are_the_sums_unrounded(dtype: torch.dtype, isa: str, k: int, n: int) -> None:
    x, weight, bias = tensors(k, n, dtype)
    packed = packer(NativePacker, dtype, isa)(weight, bias)
    found = packed(x, wide=True)
    assert found.dtype is torch.float32 and found.is_contiguous()
    assert torch.equal(found.to(dtype), packed(x))
    assert_close(found, x, weight, bias)
    assert torch.equal(packed(x[7:8], wide=True), found[7:8])


@pytest.mark.parametrize("dtype", list(ISAS))
def test_no_rows(dtype: torch.dtype) -> None:
    assert ops.pack_linear(torch.ones(5, 8, dtype=dtype))(torch.empty(0, 8, dtype=dtype)).shape == (0, 5)


def test_another_dtype_or_layout_of_x_is_refused() -> None:
    packed = ops.pack_linear(torch.ones(4, 8, dtype=torch.bfloat16))
    with pytest.raises(AssertionError):
        ops.linear(torch.ones(3, 8), packed)
    with pytest.raises(AssertionError):
        ops.linear(torch.ones(8, 3, dtype=torch.bfloat16).T, packed)


def test_transposed_weight_is_taken() -> None:
    weight = torch.randn(8, 40).T
    x = torch.randn(3, 8)
    assert_close(ops.pack_linear(weight)(x), x, weight, None)


def test_not_a_number_stays_in_its_row() -> None:
    x, weight, _ = tensors(64, 40, torch.bfloat16, 20)
    x[3, 5] = torch.nan
    out = ops.pack_linear(weight)(x)
    assert out[3].isnan().all() and not out[:3].isnan().any() and not out[4:].isnan().any()


def test_memory_outlives_its_giver() -> None:
    memory = WeightMemory()
    first, second = memory.take(100), memory.take(WeightMemory.CHUNK + 1)
    third = memory.take(64)
    del memory
    for i, tensor in enumerate((first, second, third)):
        tensor.fill_(i)
    assert [int(tensor.max()) for tensor in (first, second, third)] == [0, 1, 2]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (first, second, third))


def test_another_order_of_sums_is_noticed() -> None:
    """The comparisons above can fail: sums in halves have other bits."""
    x, weight, _ = tensors(576, 300, torch.float32)
    packed, left, right = (ops.pack_linear(w) for w in (weight, weight[:, :288], weight[:, 288:]))
    assert not torch.equal(left(x[:, :288]) + right(x[:, 288:]), packed(x))


def skip_where_onednn_is_not_exact(dtype: str) -> None:
    """As the start-up block then says."""
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 on this CPU")
    if dtype == "float32" and torch.__version__ < (2, 13):
        pytest.skip("the last rows of a product have other bits by the oneDNN of torch 2.11, on a CPU with AVX2")


ONEDNN = """
import torch
from kernels.exactness import probe
from kernels.cpu.linear import pack_onednn
from kernels.ops import gate_mul
dtype = getattr(torch, {dtype!r})
for k, n in ((576, 960), (1536, 576)):
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    packed = pack_onednn(weight, bias)
    x = torch.randn(33, k).to(dtype)
    assert torch.equal(pack_onednn(weight, bias, "gelu_tanh")(x), gate_mul(packed(x), "gelu_tanh"))
    torch.testing.assert_close(packed(x), torch.nn.functional.linear(x, weight, bias), atol=0.5, rtol=0.02)
    assert probe(packed, dtype) is None, probe(packed, dtype)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_onednn_is_exact_too(dtype: str) -> None:
    """In a process of its own: oneDNN's limit is read once."""
    skip_where_onednn_is_not_exact(dtype)
    code = ONEDNN.format(dtype=dtype)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


WITHOUT_LIBRARY = """
import torch
from kernels import ops
from kernels.cpu import library
from kernels.exactness import probe
from kernels.cpu.linear import OneDnnLinear
library.load = lambda: None
for k, n in ((576, 960), (1536, 576)):
    packed = ops.pack_linear(torch.randn(n, k).to(torch.{dtype}))
    assert isinstance(packed, OneDnnLinear), packed
    assert probe(packed, torch.{dtype}) is None, probe(packed, torch.{dtype})
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_onednn_is_exact_when_it_is_chosen_without_our_library(dtype: str) -> None:
    """The way there must not use oneDNN before its limit is set."""
    skip_where_onednn_is_not_exact(dtype)
    code = WITHOUT_LIBRARY.format(dtype=dtype)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("dtype", list(ISAS))
def test_others_give_wide_results_too(dtype: torch.dtype) -> None:
    x, weight, bias = tensors(33, 70, dtype)
    packers = [reference.pack_linear]
    if dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packers.append(pack_onednn)
    for pack in packers:
        packed = pack(weight, bias)
        assert torch.equal(packed(x, wide=True), packed(x).float())


@pytest.mark.parametrize("dtype", list(ISAS))
def test_no_gated_weight_has_wide_results(dtype: torch.dtype) -> None:
    x, weight, _ = tensors(64, 40, dtype, 3)
    codes = Int8Weight.empty(*weight.shape, torch.device("cpu"))
    codes.fill(slice(None), weight)
    packed: list[ops.PackedLinear] = [
        ops.pack_linear(weight, None, "silu"),
        ops.pack_coded_linear(codes, dtype, None, "silu"),
        reference.pack_linear(weight, None, "silu"),
        reference.pack_coded_linear(codes, dtype, None, "silu"),
    ]
    if dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed.append(pack_onednn(weight, None, "silu"))
    for each in packed:
        assert ops.linear(x, each).shape == (3, 20)
        with pytest.raises(AssertionError, match="no outputs"):
            ops.linear(x, each, wide=True)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 7, 13, 40])
def test_threads_for_whom_nothing_is_left(dtype: torch.dtype, isa: str, rows: int) -> None:
    """More of them than rows, or than blocks of outputs; they have no memory yet. Rows are a multiple of 4 KiB apart,
    so that every share with rows packs them."""
    x, weight, bias = tensors(8192, 20, dtype, rows)
    x = x.contiguous()
    packed = packer(NativePacker, dtype, isa)(weight, bias)
    expected = packed(x)
    set_threads(3)
    for _ in range(10):
        with ThreadPoolExecutor(1) as fresh:
            assert torch.equal(fresh.submit(packed, x).result(), expected)


@pytest.mark.parametrize("dtype", list(ISAS))
@pytest.mark.parametrize("gate", GATES)
def test_reference_is_gated_too(dtype: torch.dtype, gate: ops.Gate) -> None:
    x, weight, bias = tensors(64, 40, dtype, 5)
    out = reference.pack_linear(weight, bias, gate)(x)
    torch.testing.assert_close(out, ops.pack_linear(weight, bias, gate)(x), atol=0.02, rtol=0.02)


def test_an_unknown_gate_and_an_odd_number_of_rows_are_refused() -> None:
    with pytest.raises(AssertionError):
        ops.pack_linear(torch.ones(4, 8), gate="relu")  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        ops.pack_linear(torch.ones(5, 8), gate="silu")


def test_no_op_is_left_to_torch_where_the_library_is_there() -> None:
    if library.load() is None:
        pytest.skip("no native library")
    for dtype in ISAS:
        assert choose("pack_linear", "cpu", dtype).name.startswith("C++")
    packed = ops.pack_linear(torch.ones(2, 2))
    assert not isinstance(packed, OneDnnLinear | reference.TorchLinear)
    assert isinstance(pack_onednn(torch.ones(2, 2)), OneDnnLinear)
