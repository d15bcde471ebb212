"""Scales of a file on the device."""

from dataclasses import replace

import numpy as np
import torch

from configs.kv import KVFormat, LayerKV
from engine.kv_scales import KVScales
from engine.runner.kv_store import UNTRANSFORMED, static_transforms
from kernels.ops import NO_TRANSFORM

CPU = torch.device("cpu")
INT8, INT4, BF16 = KVFormat.INT8, KVFormat.INT4, KVFormat.BF16
LAYERS = (LayerKV(2, 8, INT8, static=True), LayerKV(1, 16, INT8, static=True))
RANDOM = np.random.default_rng(1)
NUMBERS = tuple(tuple(RANDOM.random((layer.kv_heads, layer.head_dim), np.float32) for _ in "kv") for layer in LAYERS)
SCALES = KVScales("Tiny", (INT8, INT8), "channel", 300, NUMBERS)


def test_every_half_gets_its_own():
    for found, both in zip(static_transforms(SCALES, LAYERS, CPU), NUMBERS, strict=True):
        for transform, numbers in zip(found, both, strict=True):
            x = transform.channels
            assert x is not None and np.array_equal(x.numpy(), numbers)
            assert x.dtype == torch.float32 and x.is_contiguous() and transform.centre is transform.feedback is None


def test_only_halves_with_fixed_scales_get_them():
    layers = (replace(LAYERS[0], value_format=INT4), LayerKV(1, 16, BF16))
    (k, v), skipped = static_transforms(SCALES, layers, CPU)
    assert np.array_equal(k.channels, NUMBERS[0][0]) and v is NO_TRANSFORM and skipped == UNTRANSFORMED
    layers = (replace(LAYERS[0], format=BF16, value_format=INT8), LAYERS[1])
    (k, v), _ = static_transforms(SCALES, layers, CPU)
    assert k is NO_TRANSFORM and np.array_equal(v.channels, NUMBERS[0][1])
