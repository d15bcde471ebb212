"""Linear layers in Triton: right, and the same bits for a row whatever the number of rows and whoever computes what."""

from collections.abc import Callable, Iterator

import pytest
import torch
from error_rule import assert_near

from kernels import ops
from kernels.grouped_weight import GroupedWeight
from kernels.int8_weight import Int8Weight
from kernels.reference import linear as reference
from kernels.triton import linear
from kernels.triton.elementwise import gate_mul
from kernels.triton.linear import TILES, Tile, parts_of, tile_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
each_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
SHARED = 227 << 10
"""Of an H100."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short parts, and few programs occupy a GPU, few are side by side: small layers go the ways of large ones."""

    def forget() -> None:
        parts_of.cache_clear()
        tile_of.cache_clear()

    monkeypatch.setattr(linear, "PART", 64)
    monkeypatch.setattr(linear, "FULL", 3)
    monkeypatch.setattr(linear, "TOGETHER", 2)
    forget()
    yield
    forget()


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, with NaN between rows and behind the last one, weight, bias."""
    x = torch.full((rows + 1, inputs + 5), torch.nan, dtype=dtype)[:rows, 2 : inputs + 2]
    x.copy_(normal(rows, inputs, seed=1))
    weight = (normal(outputs, inputs, seed=2) * inputs**-0.5).to(dtype)
    return x, weight, normal(outputs, dtype=dtype, seed=3)


# ------------------------------------------------------------------ right
@each_dtype
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "with_bias"),
    [(5, 576, 150, True), (33, 77, 70, False), (1, 1, 1, True), (70, 128, 64, False)],
)
def test_right(dtype: torch.dtype, rows: int, inputs: int, outputs: int, with_bias: bool, small: None) -> None:
    x, weight, bias = tensors(rows, inputs, outputs, dtype)
    some = bias if with_bias else None
    packed = linear.pack_linear(weight, some)
    assert (packed.in_features, packed.out_features) == (inputs, outputs)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    found = ops.linear(x, packed)
    assert_near(found, reference.pack_linear(weight, some)(x.contiguous()), exact)
    wide = ops.linear(x, packed, wide=True)
    assert wide.dtype is FP32 and torch.equal(wide.to(dtype), found) and found.is_contiguous()
    assert_near(wide, (x.float() @ weight.float().T + (bias.float() if with_bias else 0)), exact)


@each_dtype
@pytest.mark.parametrize(("rows", "gate"), [(4, "silu"), (40, "gelu_tanh")])
def test_gated_is_linear_and_gate_mul_in_the_same_bits(
    dtype: torch.dtype, rows: int, gate: ops.Gate, small: None
) -> None:
    x, weight, bias = tensors(rows, 96, 2 * 45, dtype)
    gated, plain = linear.pack_linear(weight, bias, gate), linear.pack_linear(weight, bias)
    assert (gated.in_features, gated.out_features) == (96, 45)
    assert torch.equal(ops.linear(x, gated), gate_mul(ops.linear(x, plain), gate))
    with pytest.raises(AssertionError, match=ops.GATED_IS_NOT_WIDE):
        gated(x, True)


@each_dtype
@pytest.mark.parametrize(("rows", "with_bias"), [(3, True), (40, False)])
def test_int8(dtype: torch.dtype, rows: int, with_bias: bool, small: None) -> None:
    x, weight, bias = tensors(rows, 200, 70, dtype)
    codes = Int8Weight.empty(70, 200, torch.device("cpu"))
    codes.fill(slice(None), weight)
    some = bias if with_bias else None
    packed = linear.pack_coded_linear(codes, dtype, some)
    exact = x.double() @ (codes.codes.double() * codes.scales.double()[:, None]).T
    exact += bias.double() if with_bias else 0
    assert_near(ops.linear(x, packed), reference.pack_coded_linear(codes, dtype, some)(x), exact)
    gated = linear.pack_coded_linear(codes, dtype, some, "silu")
    assert torch.equal(gated(x), gate_mul(packed(x), "silu"))


def test_codes_in_groups_are_unpacked() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (66, 64), generator=generator, dtype=torch.int8)
    weight = GroupedWeight(codes, normal(66, 2) / 1000, None, 8)
    x, _, bias = tensors(3, 64, 66, BF16)
    found = linear.pack_coded_linear(weight, BF16, bias, "gelu_tanh")(x)
    assert torch.equal(found, linear.pack_linear(weight.widened().to(BF16), bias, "gelu_tanh")(x))


def test_no_rows_at_all() -> None:
    packed = linear.pack_linear(torch.ones(6, 4), None, "silu")
    assert packed(torch.ones(0, 4)).shape == (0, 3)


def test_a_weight_whose_rows_are_apart_is_packed() -> None:
    x, weight, _ = tensors(3, 64, 32, FP32)
    wide = torch.cat([weight, weight], 1)[:, :64]
    assert torch.equal(linear.pack_linear(wide)(x), linear.pack_linear(weight)(x))


# ------------------------------------------------------------------ exact
KINDS: dict[str, Callable[[], linear.TritonLinear]] = {
    "bf16": lambda: linear.pack_linear(*tensors(1, 300, 70, BF16)[1:]),
    "fp16, no bias": lambda: linear.pack_linear(tensors(1, 300, 70, FP16)[1]),
    "fp32": lambda: linear.pack_linear(*tensors(1, 300, 70, FP32)[1:]),
    "int8": lambda: linear.pack_coded_linear(codes_of(70, 300), BF16, tensors(1, 300, 70, BF16)[2]),
}


def codes_of(outputs: int, inputs: int) -> Int8Weight:
    codes = Int8Weight.empty(outputs, inputs, torch.device("cpu"))
    codes.fill(slice(None), normal(outputs, inputs))
    return codes


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_bits_in_any_company(kind: str, small: None) -> None:
    packed = KINDS[kind]()
    x = tensors(130, 300, 70, packed.weight.dtype if packed.scales is None else BF16)[0]
    together = packed(x)
    for rows in (1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 129):
        start = rows * 37 % (131 - rows)
        assert torch.equal(packed(x[start : start + rows]), together[start : start + rows]), rows
    order = torch.randperm(130, generator=torch.Generator().manual_seed(0))
    assert torch.equal(packed(x[order]), together[order])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_tiles_and_parts_apart_or_folded_do_not_matter(
    dtype: torch.dtype, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = tensors(40, 300, 70, dtype)
    packed = linear.pack_linear(weight, bias)
    expected = packed(x)
    assert parts_of(70, 300, 128 // dtype.itemsize)[0] > 2
    for tile in TILES:
        for apart in (False, True):
            monkeypatch.setattr(linear, "tile_of", lambda *shape, chosen=(tile, apart): chosen)
            assert torch.equal(packed(x), expected), (tile, apart)


def test_order_is_seen_in_the_bits(small: None) -> None:
    """So that what is the same above is the same for its order."""
    x, weight, bias = tensors(4, 300, 150, FP32)
    found = linear.pack_linear(weight, bias)(x)
    assert not torch.equal(linear.pack_linear(weight.flip(1), bias)(x.flip(1)), found)


# ------------------------------------------------------------------ who computes what
SHAPES = [(6144, 1024), (1024, 2048), (1024, 3072), (4096, 14336), (28672, 4096), (151936, 1024), (960, 576), (33, 70)]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_weights_parts_hold_all_of_its_inputs(outputs: int, inputs: int) -> None:
    parts, span = parts_of(outputs, inputs, 64)
    assert span % 64 == 0 and (parts - 1) * span < inputs <= parts * span
    assert parts == 1 or (span >= 256 and outputs < 64 * 64)
    programs = -(-outputs // 64) * parts
    assert programs >= 64 or inputs // parts < 512, "a GPU's memory is busy with one row, or there is little to read"


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("room", [99 << 10, 163 << 10, SHARED], ids=["RTX 4090", "A100", "H100"])
@pytest.mark.parametrize("largest", [256 * 128, 128 * 128, 64 * 64])
def test_tiles_fit_and_waste_less_than_half(outputs: int, inputs: int, room: int, largest: int) -> None:
    parts, _ = parts_of(outputs, inputs, 64)
    for rows in (*range(1, 66), 100, 128, 129, 256, 257, 1000, 4096, 16384):
        tile, apart = tile_of(rows, outputs, parts, largest, room)
        assert tile.shared_bytes <= room and tile.rows * tile.outputs <= largest
        assert tile.rows == 16 or tile.rows < 2 * rows
        assert not apart or (parts > 1 and rows * outputs * parts * 4 <= 32 << 20), "little memory for sums of parts"


def test_many_rows_take_large_tiles_and_few_take_small_ones() -> None:
    assert tile_of(4096, 4096, 1, 256 * 128, SHARED) == (TILES[0], False)
    assert tile_of(4096, 4096, 1, 256 * 128, 163 << 10) == (TILES[1], False)
    assert tile_of(1, 4096, 1, 256 * 128, SHARED) == (Tile(16, 64, 4, 6), False)
    assert tile_of(1, 1024, 4, 128 * 128, SHARED) == (Tile(16, 64, 4, 6), True)
    assert tile_of(4096, 1024, 4, 128 * 128, SHARED) == (Tile(128, 128, 8, 3), False)


# ------------------------------------------------------------------ far
def test_offsets_of_more_than_32_bits(far_memory: Callable[[int], torch.Tensor]) -> None:
    """In x, in the weight and in what comes out: of a layer that is mostly not computed."""
    rows, stride, inputs, outputs = 17, 2**27, 2**26, 2**27
    x = torch.as_strided(far_memory(rows * stride * 2).view(FP16), (rows, 64), (stride, 1))
    weight = torch.as_strided(far_memory(64 * inputs).view(torch.int8), (64, 64), (inputs, 1))
    out = torch.as_strided(far_memory(rows * outputs * 2).view(FP16), (rows, 64), (outputs, 1))
    x.copy_(normal(rows, 64))
    weight.copy_(normal(64, 64) * 30)
    linear._multiply[1, 1](
        x, stride, weight, None, None, out, rows, outputs, inputs, 1, 64,
        ROWS=32, OUTPUTS=64, DEPTH=64, EVEN=True, FOLDS=False, TOGETHER=16,
    )  # fmt: skip
    assert (rows - 1) * stride >= 2**31 and 63 * inputs >= 2**31
    torch.testing.assert_close(out.float(), x.float() @ weight.float().T, atol=1e-2, rtol=2e-3)
