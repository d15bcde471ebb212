"""The oracle itself, against formulas written another way."""

import math

import pytest
import torch

from kernels import ops, reference


def test_rms_norm_is_the_formula_in_fp64():
    x, weight = torch.randn(5, 48), torch.randn(48)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert (reference.rms_norm(x, weight, 1e-5).double() - exact).abs().max() < 1e-5


def test_rms_norm_rounds_before_it_multiplies_by_the_weight():
    x, weight = torch.randn(64, 48).bfloat16(), torch.randn(48).bfloat16()
    normed = torch.nn.functional.rms_norm(x.float(), (48,), eps=1e-5).bfloat16()
    assert torch.equal(reference.rms_norm(x, weight, 1e-5), normed * weight)


def test_add_rms_norm_adds_in_place():
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    total = x + residual
    out = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(out, reference.rms_norm(total, weight, 1e-6))


def test_rotary_turns_complex_numbers():
    positions = torch.tensor([0, 7, 3])
    angles = torch.arange(10.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    fused = torch.randn(3, 40)
    q, k = fused[:, :12].view(3, 2, 6), fused[:, 20:26].view(3, 1, 6)
    expected = []
    for x in (q, k):
        turned = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(3, 3), angles[positions])[:, None]
        expected.append(torch.cat([turned.real, turned.imag], -1))
    untouched = fused[:, 12:20].clone()
    reference.rotary(q, k, positions, angles.cos(), angles.sin())
    for x, turned in zip((q, k), expected, strict=True):
        torch.testing.assert_close(x, turned)
    assert torch.equal(fused[:, 12:20], untouched)


def test_rms_norm_multiplies_a_wide_weight_before_it_rounds():
    x, weight = torch.randn(64, 48).bfloat16(), 1 + torch.randn(48)
    exact = torch.nn.functional.rms_norm(x.float(), (48,), weight, eps=1e-6)
    assert reference.rms_norm(x, weight, 1e-6).dtype is torch.bfloat16
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), exact.bfloat16())


def test_rms_norm_of_heads_is_that_of_each():
    fused, weight = torch.randn(5, 100), torch.randn(16)
    heads = fused[:, 7 : 7 + 48].view(5, 3, 16)
    out = reference.rms_norm(heads, weight, 1e-6)
    assert out.is_contiguous()
    for head in range(3):
        torch.testing.assert_close(out[:, head], reference.rms_norm(heads[:, head], weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm_rotary_is_the_norms_then_rotary(dtype):
    """In place, in views of one buffer, each head with its part's weight."""
    fused, angles, positions = torch.randn(3, 40).to(dtype), torch.rand(10, 2), torch.tensor([4, 9, 0])
    before, (q_weight, k_weight) = fused.clone(), torch.randn(2, 6).to(dtype)
    q, k = fused[:, :12].view(3, 2, 6), fused[:, 20:26].view(3, 1, 6)
    expected = reference.rms_norm(q, q_weight, 1e-3), reference.rms_norm(k, k_weight, 1e-3)
    reference.rotary(*expected, positions, angles.cos(), angles.sin())
    reference.norm_rotary(q, k, q_weight, k_weight, 1e-3, positions, angles.cos(), angles.sin())
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    assert torch.equal(fused[:, 12:20], before[:, 12:20]) and torch.equal(fused[:, 26:], before[:, 26:])


def test_rotary_of_the_first_dims_leaves_the_others():
    angles = torch.rand(10, 3)
    positions = torch.tensor([4, 9])
    q, k = torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    expected = [x[..., :6].clone() for x in (q, k)]
    rest = [x[..., 6:].clone() for x in (q, k)]
    reference.rotary(*expected, positions, angles.cos(), angles.sin())
    reference.rotary(q, k, positions, angles.cos(), angles.sin())
    for x, turned, left in zip((q, k), expected, rest, strict=True):
        assert torch.equal(x, torch.cat([turned, left], -1))


def test_gate_mul_and_linear():
    x = torch.randn(4, 10)
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(reference.gate_mul(x, "silu"), gate / (1 + (-gate).exp()) * up)
    tanh = (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()
    torch.testing.assert_close(reference.gate_mul(x, "gelu_tanh"), gate * (1 + tanh) / 2 * up)
    weight, bias = torch.randn(3, 10), torch.randn(3)
    packed = reference.pack_linear(weight, bias)
    torch.testing.assert_close(packed(x), x @ weight.T + bias)
    assert (packed.in_features, packed.out_features) == (10, 3)


def test_ops_assert_their_contracts():
    x, weight = torch.ones(2, 8), torch.ones(8)

    def normed_and_turned(positions, *weights):
        ops.norm_rotary(
            x.clone()[:, None], x.clone()[:, None], *weights, 1e-5, positions, torch.ones(1, 4), torch.zeros(1, 4)
        )

    normed_and_turned(torch.zeros(2).long(), weight, weight)
    for broken in (
        lambda: ops.rms_norm(x, weight[:4], 1e-5),
        lambda: ops.rms_norm(x, weight.double(), 1e-5),
        lambda: ops.add_rms_norm(x, x[:1], weight, 1e-5),
        lambda: ops.rms_norm(x[:, None].expand(2, 3, 8), weight, 1e-5),
        lambda: ops.rms_norm(x.bfloat16(), weight.half(), 1e-5),
        lambda: ops.gate_mul(x[:, :5], "silu"),
        lambda: ops.gate_mul(x, "tanh"),
        lambda: ops.pack_linear(x, weight),
        lambda: ops.linear(x[:, :4], ops.pack_linear(x)),
        lambda: ops.rotary(x[:, None], x[:, None], torch.zeros(2), x[:, :4], x[:, :4]),
        lambda: normed_and_turned(torch.zeros(2), weight, weight),
        lambda: normed_and_turned(torch.zeros(2).long(), weight[:4], weight[:4]),
        lambda: normed_and_turned(torch.zeros(2).long(), weight, weight.bfloat16()),
        lambda: normed_and_turned(torch.zeros(2).long(), weight.bfloat16(), weight.bfloat16()),
    ):
        with pytest.raises(AssertionError):
            broken()
