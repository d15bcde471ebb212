"""What is found of a model's keys, and what it is good for."""

import math
from pathlib import Path

import pytest
import torch
from engines import Loaded
from tiny_models import TinyModel, build

from configs.kv import KVFormat, LayerKV
from engine.runner.key_fit import DAMPING, KeyFit, LayerMoments, feedback
from engine.runner.kv_store import UNTRANSFORMED
from kernels.ops import NO_TRANSFORM
from kernels.reference.kv_formats import decode_int4, encode, rotate

SCALED = [KVFormat.FP8_E4M3, KVFormat.INT8, KVFormat.INT4]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seen(q: torch.Tensor, k: torch.Tensor) -> LayerMoments:
    moments = LayerMoments()
    for start in range(0, len(k), 7):
        moments.add(q[start : start + 7], k[start : start + 7])
    return moments


def test_centre_and_channels_are_mean_and_root_of_the_spread() -> None:
    k = random(500, 2, 32) * torch.logspace(-1, 1, 32) + random(2, 32, seed=1) * 5
    transform = seen(random(500, 6, 32, seed=2), k).transform(LayerKV(2, 32, KVFormat.INT8))
    torch.testing.assert_close(transform.centre, k.mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(transform.channels, k.std(dim=0, correction=0).sqrt(), rtol=1e-4, atol=1e-5)


def test_feedback_is_from_the_queries_as_they_meet_what_is_stored() -> None:
    """The definition, in one go over all tokens."""
    q, k, layer = random(300, 4, 32, seed=2), random(300, 2, 32), LayerKV(2, 32, KVFormat.INT4)
    transform = seen(q, k).transform(layer)
    assert transform.channels is not None and transform.feedback is not None
    for head in range(2):
        met = rotate(q[:, 2 * head : 2 * head + 2].double() * transform.channels[head].double()).flatten(0, 1)
        products = met.T @ met
        products += DAMPING * products.diagonal().mean() * torch.eye(32)
        upper = torch.linalg.cholesky(products.inverse()).T
        expected = (upper / upper.diagonal()[:, None]).triu(1)
        torch.testing.assert_close(transform.feedback[head].triu(1).double(), expected, rtol=1e-3, atol=1e-5)


def test_queries_see_less_of_the_error() -> None:
    """Queries that lie in few directions, as real ones do: scores come out several times nearer."""
    q = random(1000, 6, seed=1) @ random(6, 64, seed=2) + 0.1 * random(1000, 64, seed=3)
    k, layer = random(1000, 1, 64), LayerKV(1, 64, KVFormat.INT4)
    fitted = seen(q[:, None], k).transform(layer)
    errors = []
    for transform in (NO_TRANSFORM, fitted):
        stored = encode(k, layer, KVFormat.INT4, transform)
        assert stored.scales is not None and stored.zeros is not None
        meets = rotate(q if transform.channels is None else q * transform.channels[0])
        scores = meets @ decode_int4(stored.codes, stored.scales, stored.zeros)[:, 0].T
        exact = q @ (k[:, 0] - (0 if transform.centre is None else transform.centre[0])).T
        errors.append((scores - exact).square().mean().sqrt().item())
    assert errors[1] < errors[0] / 3


def test_where_scores_are_bent_nothing_is_subtracted() -> None:
    moments = seen(random(50, 2, 32), random(50, 1, 32) + 3)
    moments.is_bent = True
    transform = moments.transform(LayerKV(1, 32, KVFormat.INT4))
    assert transform.centre is None and transform.channels is not None and transform.feedback is not None
    assert (transform.channels.square() > 2.9).all()  # then all that is stored has the width of what it is


def test_degenerate_numbers() -> None:
    layer = LayerKV(1, 32, KVFormat.INT8)
    silent = seen(torch.zeros(9, 1, 32), torch.ones(9, 1, 32)).transform(layer)
    assert silent.feedback is not None and not silent.feedback.triu(1).any()
    assert silent.channels is not None and (silent.channels > 0).all() and silent.channels.isfinite().all()
    narrow = random(90, 1, 32)
    narrow[..., 5] = 1.0
    channels = seen(random(90, 1, 32), narrow).transform(layer).channels
    assert channels is not None and channels.max() / channels.min() <= math.sqrt(2**10) * 1.001
    for broken in (math.nan, math.inf):
        assert seen(torch.full((9, 1, 32), broken), random(9, 1, 32)).transform(layer) is NO_TRANSFORM
        assert seen(random(9, 1, 32), torch.full((9, 1, 32), broken)).transform(layer) is NO_TRANSFORM
    assert feedback(torch.zeros(2, 4, 4, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("format", list(KVFormat))
def test_only_keys_with_scales_of_their_own_are_fitted(tmp_path: Path, format: KVFormat) -> None:
    loaded = Loaded.load(build(tmp_path, TinyModel(head_dim=32)), torch.float32, 512)
    plain = loaded.config.kv_layers(KVFormat.FP32)
    fit = KeyFit.of(loaded.model, plain, list(range(100)), 512, torch.device("cpu"))
    layers = loaded.config.kv_layers(format)
    for layer, (k, v) in zip(layers, fit.transforms(layers), strict=True):
        assert v is NO_TRANSFORM and (k is not NO_TRANSFORM) == (format in SCALED)
        if k is not NO_TRANSFORM:
            assert k.feedback is not None and k.feedback.shape == (layer.kv_heads, layer.head_dim, layer.head_dim)
    static = [LayerKV(layer.kv_heads, layer.head_dim, KVFormat.INT8, static=True) for layer in layers]
    assert fit.transforms(static) == [UNTRANSFORMED] * len(layers)


def test_a_text_of_one_token_and_a_small_window(tmp_path: Path) -> None:
    loaded = Loaded.load(build(tmp_path, TinyModel(head_dim=32)), torch.float32, 512)
    plain = loaded.config.kv_layers(KVFormat.FP32)
    for token_ids, window in (([3], 512), (list(range(50)), 16)):
        fit = KeyFit.of(loaded.model, plain, token_ids, window, torch.device("cpu"))
        [(k, _), *_] = fit.transforms(loaded.config.kv_layers(KVFormat.INT4))
        assert k.feedback is not None and k.feedback.isfinite().all()
