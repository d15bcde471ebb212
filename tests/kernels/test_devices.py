"""What serves tensors that are not on the CPU: the reference, which never asks where they are."""

import pytest
import torch
from draws import columns
from paged import make_paged
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from configs.kv import KVFormat
from configs.pool import SCORES_BYTES
from kernels import ops, reference
from kernels.reference import attention
from kernels.reference.attention import attend_alone, attend_together
from kernels.reference.pages import Past, gather_kv
from kernels.registry import candidates, choose
from kernels.triton import offers

OPS = [candidate.op for candidate in reference.CANDIDATES]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class OnlyWhereTheyAre(TorchFunctionMode):
    """Refuses what is made without a tensor that says on which device, and ways from a tensor to the CPU's memory."""

    LEAVING = ("cpu", "numpy", "data_ptr", "__array__", "pin_memory")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert func.__name__ not in self.LEAVING, func
        given = [*args, *(kwargs or {}).values()]
        given += [item for each in given if isinstance(each, list | tuple) for item in each]
        made = isinstance(result, torch.Tensor) and not any(isinstance(each, torch.Tensor) for each in given)
        made = made and "device" not in (kwargs or {})
        assert not made, f"{func} made a tensor on a device that nobody named"
        return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_cuda_gets_no_cpu_kernel_and_each_says_why_not(op, dtype):
    """The reference, where Triton does not serve the op here."""
    choice = choose(op, "cuda", dtype)
    assert choice.name == reference.NAME or (choice.name == offers.NAME and torch.cuda.is_available())
    refused, others = dict(choice.refused), [candidate.name for candidate in candidates(op) if candidate.on_request]
    ours = {candidate.name for candidate in candidates(op)} - {reference.NAME, offers.NAME, *others}
    assert {refused[name] for name in ours} <= {"runs on the CPU, not on cuda"}
    assert len(refused) == len(candidates(op)) - 1 > 0
    assert not ours & dict(choice.better).keys(), "nobody misses them there"


def test_the_check_refuses_new_tensors_and_ways_to_the_cpu():
    x = torch.ones(3)
    with OnlyWhereTheyAre():
        x.new_zeros(2).add_(x[:2]), torch.empty_like(x), torch.arange(3, device=x.device)  # all of these say where
        for broken in (lambda: torch.arange(3), lambda: torch.tensor([1.0]), x.numpy, x.cpu):
            with pytest.raises(AssertionError):
                broken()


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, 2.0)])
@pytest.mark.parametrize("formats", [None, (KVFormat.INT8, KVFormat.INT4), (KVFormat.FP8_E4M3, KVFormat.FP8_E5M2)])
def test_ops_make_nothing_elsewhere(window, softcap, formats):
    paged = make_paged([40, 21], formats=formats, static=formats is not None and KVFormat.FP8_E5M2 in formats)
    starts, lengths = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([40, 21], dtype=torch.int32)
    q, slots = torch.cat([paged.q[0][-3:], paged.q[1][-1:]]), torch.tensor([5, -1, 3])
    angles, positions, x, norm = (
        torch.ones(9, 32),
        torch.tensor([0, 1, 2, 8]),
        torch.ones(2, 384).bfloat16(),
        torch.ones(384),
    )
    k, query = Past(paged.k[0].float().transpose(0, 1)), paged.q[0][-3:].float()
    sinks = None if softcap is None else torch.ones(6)
    limits = columns(4, [(0, 1.0, 0.0), (5, 0.9, 0.1)], [1.0, 0.0])
    with OnlyWhereTheyAre():
        asked = paged.scale, window, softcap, sinks
        reference.paged_attention(q, paged.pages(), paged.tables, starts, lengths, *asked)
        attend_together(query, k, k, *asked, torch.empty_like(query))
        reference.store_kv(paged.k[0][:3], paged.v[0][:3], paged.pages(), slots)
        reference.copy_blocks(paged.pool, [(0, 1)])
        reference.draw(norm[None].expand(4, -1), *limits)
        reference.rotary(q, q, positions, angles, angles)
        reference.add_rms_norm(x, x, norm, 1e-6)
        reference.pack_linear(q.flatten(1), None, "gelu_tanh")(reference.rms_norm(x, norm, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_device_give_rows_of_that_device(dtype):
    """Without the device itself: shapes, dtypes and devices are worked out, and mixtures of devices refused."""
    with FakeTensorMode():
        x, weight = (torch.empty(size, 16, dtype=dtype, device="cuda") for size in (5, 32))
        norm, wide = torch.empty(16, dtype=dtype, device="cuda"), torch.empty(16, device="cuda")
        heads, head_norm = x.view(5, 2, 8), torch.empty(8, device="cuda")
        outputs = [
            reference.rms_norm(x, norm, 1e-6),
            reference.rms_norm(heads, head_norm, 1e-6),
            reference.add_rms_norm(x, x, wide, 1e-6),
            *(reference.gate_mul(x, gate) for gate in ops.GATES),
            *(reference.pack_linear(weight, None, gate)(x) for gate in (None, *ops.GATES)),
        ]
        assert all(out.device.type == "cuda" and out.dtype is dtype for out in outputs)
        assert [tuple(out.shape) for out in outputs] == [
            (5, 16), (5, 2, 8), (5, 16), (5, 8), (5, 8), (5, 32), (5, 16), (5, 16),
        ]  # fmt: skip
        with pytest.raises(RuntimeError, match=r"same device|different devices"):
            reference.rms_norm(x, torch.empty(16, dtype=dtype), 1e-6)


@pytest.mark.parametrize("scores", [2**24, 700, 1], ids=["at once", "some rows", "row by row"])
@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize("rows", [1, 5, 37])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (0.7, None), (None, torch.arange(6.0) - 3)])
def test_rows_together_see_what_each_sees_alone(rows, window, scores, softcap, sinks, monkeypatch):
    """What a GPU computes, here on the CPU: 37 tokens, 6 query heads over 2."""
    monkeypatch.setattr(attention, "SCORES", scores)
    generator = torch.Generator().manual_seed(rows)
    fused = torch.randn(rows, 100, generator=generator)  # rows have a stride of their own
    q = fused[:, :96].view(rows, 6, 16)
    k, v = (Past(x) for x in torch.randn(2, 2, 37, 16, generator=generator))
    expected, found = torch.empty(rows, 6, 16), torch.empty(rows, 6, 16)
    asked = 0.25, window, softcap, sinks
    attend_alone(q, k, v, *asked, expected)
    attend_together(q, k, v, *asked, found)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    half = torch.empty(rows, 6, 16, dtype=torch.float16)
    attend_together(q.half(), k, v, *asked, half)
    torch.testing.assert_close(half.float(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("window", [None, 9])
def test_scales_of_rows_together_are_those_of_each_alone(window):
    """Those of tokens that a row does not see may be anything."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(5, 6, 16, generator=generator)
    k, v = (Past(x, torch.rand(2, 37, generator=generator)) for x in torch.randn(2, 2, 37, 16, generator=generator))
    expected, found, poisoned = torch.empty(3, 5, 6, 16)
    attend_alone(q, k, v, 0.25, window, None, None, expected)
    attend_together(q, k, v, 0.25, window, None, None, found)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for past in (k, v):
        past.scales[:, -1] = torch.nan
    attend_together(q, k, v, 0.25, window, None, None, poisoned)
    assert torch.equal(poisoned[:-1], found[:-1]) and poisoned[-1].isnan().all()


@pytest.mark.parametrize("formats", [None, (KVFormat.INT8,) * 2, (KVFormat.INT4,) * 2, (KVFormat.FP8_E5M2,) * 2])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("which", ["K", "V"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_rows_together_do_not_notice_what_they_do_not_see(formats, window, which, poison):
    """K or V of a token in the middle of the chunk, of one of two heads, is not finite: rows before it, rows whose
    window is past it and the other head get numbers, the others NaN, as each row alone (or infinity there)."""
    paged = make_paged([40], dtype=torch.bfloat16, formats=formats)
    x = (paged.k if which == "K" else paged.v)[0]
    x[25, 1] = poison
    paged.store(0)
    q, asked = paged.q[0][-22:].float(), (paged.scale, window, None, None)
    past = gather_kv(paged.pages(), paged.tables[0], 0, 40, torch.bfloat16)
    expected, found = torch.empty(2, *q.shape)
    attend_alone(q, *past, *asked, expected)
    attend_together(q, *past, *asked, found)
    assert expected[:7].isfinite().all()
    expected = expected.where(expected.isfinite(), torch.nan)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_the_memory_of_scores_is_what_is_reckoned_with():
    """Four tensors of fp32 at a time."""
    assert SCORES_BYTES == 4 * 4 * attention.SCORES
