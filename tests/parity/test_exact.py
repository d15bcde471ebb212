"""Bit for bit: a request's tokens and log-probabilities do not depend on anything but the request.

The real default model at its full size, and a tiny model of each family: norms, gates, windows, partial rotations.
"""

import pytest
import torch
from engines import Completion, Engine, Loaded
from exact_ways import WAYS, Requests, alone, assert_equal
from smollm2 import smollm2
from tiny_models import FAMILIES, VARIANTS, build

from kernels import ops

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMOLLM2 = Requests.of((3, 16, 31, 75, 130, 200), range(3, 49152), few_blocks=34)
TINY = Requests.of((3, 16, 31, 75, 130), range(256), few_blocks=20)
"""Longer than the tiny models' windows by several pages."""


def dtype_of(name: str) -> torch.dtype:
    if name == "bf16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not compute in bf16")
    return DTYPES[name]


@pytest.fixture(scope="module", params=["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def smol(request: pytest.FixtureRequest) -> Loaded:
    return smollm2(dtype_of(request.param))


@pytest.fixture(scope="module")
def smol_alone(smol: Loaded) -> list[Completion]:
    return alone(smol, SMOLLM2)


@pytest.mark.parametrize("way", WAYS)
def test_bits(smol: Loaded, smol_alone: list[Completion], way: str) -> None:
    assert_equal(WAYS[way](smol, SMOLLM2), smol_alone)


@pytest.fixture(
    scope="module", params=[(family, dtype) for family in FAMILIES for dtype in sorted(DTYPES)], ids="-".join
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    family, dtype = request.param
    folder = build(tmp_path_factory.mktemp(family), VARIANTS[family])
    return Loaded.load(folder, dtype_of(dtype), 256)


@pytest.fixture(scope="module")
def tiny_alone(tiny: Loaded) -> list[Completion]:
    return alone(tiny, TINY)


@pytest.mark.parametrize("way", WAYS)
def test_bits_of_every_family(tiny: Loaded, tiny_alone: list[Completion], way: str) -> None:
    assert_equal(WAYS[way](tiny, TINY), tiny_alone)


def test_the_check_can_fail(smol: Loaded, smol_alone: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse: a linear layer whose sums depend on the number of rows is found out."""
    exact = ops.linear

    def company_dependent(x: torch.Tensor, packed: ops.PackedLinear, wide: bool = False) -> torch.Tensor:
        if x.shape[0] <= 4:
            return exact(x, packed, wide)
        half = x.shape[1] // 2
        left, right = torch.zeros_like(x), torch.zeros_like(x)
        left[:, :half], right[:, half:] = x[:, :half], x[:, half:]
        return exact(left, packed, wide) + exact(right, packed, wide)

    monkeypatch.setattr(ops, "linear", company_dependent)
    found = Engine(smol).run(SMOLLM2.prompts[:4], SMOLLM2.params[:4])
    with pytest.raises(AssertionError):
        assert_equal(found, smol_alone[:4])
