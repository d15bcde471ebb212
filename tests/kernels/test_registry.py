"""Who serves an op, and why the others do not."""

import pytest
import torch

from kernels.registry import Accepted, Candidate, NoImplementation, Refused, choose, choose_among

OPS = (
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "silu_mul",
    "pack_linear",
    "store_kv",
    "paged_attention",
    "copy_blocks",
)


def candidate(name, offer):
    return Candidate("op", name, lambda device, dtype: offer)


def test_the_first_that_accepts_serves_and_every_other_one_has_a_reason():
    candidates = [
        candidate("fastest", Refused("no AMX here")),
        candidate("fast", Accepted(len)),
        candidate("slow", Accepted(max)),
        candidate("odd", Refused("fp16 only")),
    ]
    choice = choose_among(candidates, "op", "cpu", torch.float32)
    assert choice.function is len
    assert choice.refused == (("fastest", "no AMX here"), ("slow", "fast is preferred"), ("odd", "fp16 only"))
    assert str(choice) == "op: fast (not fastest: no AMX here; slow: fast is preferred; odd: fp16 only)"


def test_nobody_accepts():
    with pytest.raises(NoImplementation, match=r"nothing implements op on cuda in torch.int8 \(only: not there\)"):
        choose_among([candidate("only", Refused("not there"))], "op", "cuda", torch.int8)
    with pytest.raises(NoImplementation, match="no candidates"):
        choose("sort", "cpu", torch.float32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_op_is_served_in_every_dtype(op, dtype):
    choice = choose(op, "cpu", dtype)
    assert callable(choice.function)
    assert choice is choose(op, "cpu", dtype)
    assert all(name and reason for name, reason in choice.refused)


def test_other_devices_get_the_reference():
    assert choose("paged_attention", "cuda", torch.bfloat16).name == "torch reference"
