"""Who serves an op, and why the others do not."""

from dataclasses import replace

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.library import ISA_TITLES, ISAS
from kernels.registry import Accepted, Candidate, NoImplementation, Refused, candidates, choose, choose_among

OPS = (
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "norm_rotary",
    "gate_mul",
    "gather_rows",
    "pack_linear",
    "store_kv",
    "paged_attention",
    "copy_blocks",
    "gather_blocks",
    "scatter_blocks",
    "softmax_weights",
    "draw_truncated",
    "draw",
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


def test_a_backend_that_is_named_serves_and_no_other_is_asked():
    def never(device, dtype):
        pytest.fail("asked")

    asked = [
        Candidate("op", "quick", never, backend="a"),
        Candidate("op", "odd", lambda *_: Refused("fp16 only"), backend="b"),
        Candidate("op", "plain", lambda *_: Accepted(len), backend="b"),
        Candidate("op", "spare", lambda *_: Accepted(max), backend="b"),
        Candidate("op", "other", never),
    ]
    choice = choose_among(asked, "op", "cpu", torch.float32, backend="b")
    assert choice.function is len and choice.better == (("quick", "--attention-backend b"), ("odd", "fp16 only"))
    assert choice.refused[2:] == (("spare", "plain is preferred"), ("other", "--attention-backend b"))
    with pytest.raises(NoImplementation) as caught:
        choose_among(asked[:2], "op", "cpu", torch.float32, backend="b")
    assert caught.value.refused == choice.better


def test_some_serve_only_where_their_backend_is_named():
    asked = [
        Candidate("op", "strange", lambda *_: Accepted(max), backend="s", on_request=True),
        Candidate("op", "usual", lambda *_: Accepted(len), backend="u"),
    ]
    choice = choose_among(asked, "op", "cpu", torch.float32)
    assert choice.function is len and choice.refused == (("strange", "on request only (--attention-backend s)"),)
    assert choose_among(asked, "op", "cpu", torch.float32, backend="s").function is max


@pytest.mark.parametrize(("here", "there"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_nobody_misses_what_is_for_other_devices(here, there):
    """It is not even asked; what is for this device is missed."""
    asked = [
        Candidate("op", "strange", lambda *_: pytest.fail("asked"), backend="s", device=there),
        Candidate("op", "quick", lambda *_: Refused("too old"), device=here),
        Candidate("op", "plain", lambda *_: Accepted(len), backend="p"),
    ]
    where = {"cpu": "the CPU", "cuda": "a GPU"}[there]
    choice = choose_among(asked, "op", here, torch.float32)
    assert choice.refused == (("strange", f"runs on {where}, not on {here}"), ("quick", "too old"))
    assert choice.function is len and choice.better == (("quick", "too old"),)
    assert choose_among(asked, "op", here, torch.float32, backend="p").better == (("quick", "--attention-backend p"),)
    with pytest.raises(NoImplementation, match=f"runs on {where}, not on {here}"):
        choose_among(asked, "op", here, torch.float32, backend="s")


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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op", ["paged_attention", "pack_linear", "rms_norm"])
def test_a_cpu_gets_the_strongest_kernels_that_it_runs(op, isa, monkeypatch):
    native = library.load()
    if native is None or isa not in native.cpu_isas:
        pytest.skip(f"no native {isa} here")
    weaker = replace(native, cpu_isas=native.cpu_isas[: native.cpu_isas.index(isa) + 1])
    monkeypatch.setattr(library, "load", lambda: weaker)
    strongest = {"avx512bf16": "avx512", "amx": "avx512"}.get(isa, isa)  # those two do not compute in fp32
    choice = choose_among(candidates(op), op, "cpu", torch.float32)
    assert choice.name == f"C++ {ISA_TITLES[strongest]}"
    for name, reason in choice.refused:
        stronger = {f"C++ {ISA_TITLES[each]}" for each in ISAS[ISAS.index(isa) + 1 :]}
        assert name not in stronger or "has no" in reason or "does not compute" in reason


def test_other_devices_get_the_reference():
    assert choose("paged_attention", "cuda", torch.bfloat16).name == "torch reference"
