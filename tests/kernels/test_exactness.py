"""The start-up probe finds every kind of inexact linear layer, and passes ours."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernels import ops
from kernels.exactness import gpu_windows, inexact, probe, report
from kernels.reference.linear import TorchLinear
from kernels.threads import num_threads, set_threads
from kernels.triton.linear import tile_of

EXACT = "not changed by other requests in the least, bit for bit (checked on this machine)"


class Layer:
    """fp64 inside, so exact, unless `spoil` changes the result: (rows of x, result) -> result."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.weight = torch.randn(24, 96)
        self.out_features, self.in_features = self.weight.shape
        self.spoil = spoil

    def __call__(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        # Row by row: BLAS is not exact in fp64 either.
        out = torch.stack([(row.double() * self.weight.double()).sum(1) for row in x]).float()
        return self.spoil(out)


def last_bit(out: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(out, torch.tensor(torch.inf))


def only(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda out: last_bit(out) if out.shape[0] == rows else out


def last_row(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[:-1], last_bit(out[-1:])])


def by_threads(out: torch.Tensor) -> torch.Tensor:
    return last_bit(out) if num_threads() == 1 else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_are_exact(dtype: torch.dtype) -> None:
    layers = {f"layer {n}": ops.pack_linear(torch.randn(n, 576).to(dtype)) for n in (960, 576)}
    assert report(inexact(layers, dtype)) == EXACT


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, 33])
def test_finds_a_path_for_few_rows(rows: int) -> None:
    assert "computed alone" in (probe(Layer(only(rows)), torch.float32) or "")


def test_finds_dependence_on_the_place() -> None:
    assert "computed alone" in (probe(Layer(last_row), torch.float32) or "")


def test_finds_dependence_on_threads() -> None:
    before = num_threads()
    set_threads(2)
    try:
        assert probe(Layer(by_threads), torch.float32) == "other bits with one thread than with several"
        assert num_threads() == 2
    finally:
        set_threads(before)


def test_report_names_the_layer() -> None:
    good, bad = Layer(lambda out: out), Layer(only(1))
    bad.out_features = 25  # another shape: probed too
    text = report(inexact({"good": good, "bad": bad}, torch.float32))
    assert text == (
        "may be changed a little by other requests or by --num-threads, since rounding differs "
        "(bad: other bits for 1 of 40 rows computed alone)"
    )


def test_finds_that_plain_torch_is_not_exact() -> None:
    """Where it is not: the reference serves without a compiler, and the block must say what that costs."""
    layer = TorchLinear(torch.randn(960, 576), None, None)
    x = torch.randn(40, 576, generator=torch.Generator().manual_seed(576))
    differs = not torch.equal(layer(x[:1]), layer(x)[:1])
    if not differs:
        pytest.skip("this BLAS computes one row as it computes forty")
    assert probe(layer, torch.float32) is not None


@pytest.mark.parametrize("outputs", [512, 1024, 4096, 28672, 151936])
def test_on_a_gpu_every_tile_is_looked_at(outputs: int) -> None:
    """Whatever the number of rows."""
    windows = gpu_windows(outputs)
    for parts in (1, 2, 4):
        tile = partial(tile_of.__wrapped__, outputs=outputs, parts=parts, largest=256 * 128, room=227 << 10)
        looked_at = {tile(end - start) for start, end in windows}
        assert {tile(rows) for rows in range(1, 2**14, 8)} <= looked_at and len(looked_at) >= 3
    total = windows[1][1]
    assert windows[:2] == ((total - 1, total), (0, total)) and all(0 <= start < end <= total for start, end in windows)
    assert total * outputs < 2**26, "bytes that nobody has set aside"
