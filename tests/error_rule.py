"""flash-attn's rule (tests/test_flash_attn.py of github.com/Dao-AILab/flash-attention): a kernel's result may be twice
as far from exact as plain torch's in the same dtype."""

import torch

from configs.kv import KVFormat, LayerKV
from kernels.ops import compute_dtype


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; NaN where one of either is. 0 of no numbers."""
    return float((found.double() - exact.double()).abs().max()) if found.numel() else 0.0


def allowed_error(plain: torch.Tensor, exact: torch.Tensor, times: float = 2) -> float:
    """plain: in the dtype in question. Few numbers may be lucky: the largest one's rounding is a quarter of eps at
    least. NaN, which no error is below, where one of either is."""
    if not exact.numel():
        return 0.0
    rounding = float(exact.abs().max()) * torch.finfo(plain.dtype).eps / 4
    return times * max(error_of(plain, exact), rounding) + 1e-5


def times_plain(layer: LayerKV, dtype: torch.dtype) -> float:
    """The `times` of attention with queries of `dtype`, plain torch having what the layer's pages mean as K and V.

    Three where scales of V are left to weights of bf16. Those are rounded with a token's scale in them, also where the
    plain weight is 1, which needs no rounding: of sequences of one token one in twelve is off by more than twice.
    """
    scaled = layer.formats[1] is not KVFormat.INT4 and layer.num_scales(layer.formats[1]) > 0
    return 3 if scaled and compute_dtype(dtype, layer.formats) is torch.bfloat16 else 2


def assert_near(found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, times: float = 2) -> None:
    """Of one dtype and one shape, and within the rule."""
    assert found.dtype is plain.dtype and found.shape == plain.shape == exact.shape, (found.dtype, found.shape)
    error, allowed = error_of(found, exact), allowed_error(plain, exact, times)
    assert error <= allowed, (error, allowed)  # NaN fails too
