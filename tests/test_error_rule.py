"""The rule by which kernels are judged."""

import pytest
import torch
from error_rule import allowed_error, assert_near, error_of, times_plain

from configs.kv import KVFormat, LayerKV

F, BF16 = KVFormat, torch.bfloat16
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("error", "ok"), [(0.0, True), (0.019, True), (0.021, False), (NAN, False), (INF, False)])
def test_twice_the_error_of_plain_torch_is_near(error: float, ok: bool) -> None:
    exact = torch.zeros(4, dtype=torch.float64)
    plain, found = torch.tensor([0.0, -0.01, 0.0, 0.0]), torch.tensor([0.0, 0.0, error, 0.0])
    if ok:
        assert_near(found, plain, exact)
        return
    with pytest.raises(AssertionError):
        assert_near(found, plain, exact)


def test_nothing_is_near_what_is_not_a_number() -> None:
    number, nan = torch.zeros(2), torch.tensor([0.0, NAN])
    for plain, exact in ((nan, number), (number, nan)):
        assert not error_of(number, exact) <= allowed_error(plain, exact)


def test_others_in_dtype_or_shape_are_not_near() -> None:
    zeros = torch.zeros(2)
    for other in (zeros.double(), zeros[:1], zeros[None]):
        with pytest.raises(AssertionError):
            assert_near(other, zeros, zeros)
    assert_near(zeros[:0], zeros[:0], zeros[:0])


def test_a_lucky_number_may_be_rounded() -> None:
    """Plain torch is exact; half a unit in the last place is as much as rounding may cost."""
    one = torch.ones(1, dtype=BF16)
    assert allowed_error(one, one.double()) == 2**-8 + 1e-5


@pytest.mark.parametrize(
    ("formats", "dtype", "static", "times"),
    [
        ((F.INT8, F.INT8), BF16, False, 3),
        ((F.BF16, F.FP8_E4M3), BF16, False, 3),
        ((F.INT8, F.INT8), BF16, True, 2),
        ((F.INT8, F.INT8), torch.float16, False, 2),
        ((F.FP32, F.INT8), BF16, False, 2),
        ((F.INT8, F.INT4), BF16, False, 2),
        ((F.INT8, F.FP8_E5M2), BF16, False, 2),
        ((F.BF16, F.BF16), BF16, False, 2),
    ],
    ids=str,
)
def test_three_times_where_weights_of_bf16_have_scales(
    formats: tuple[F, F], dtype: torch.dtype, static: bool, times: int
) -> None:
    assert times_plain(LayerKV(1, 32, formats[0], value_format=formats[1], static=static), dtype) == times
