"""On which machines Triton serves, and what it says where it does not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import ops, reference
from kernels.registry import Accepted, Refused, candidates
from kernels.triton import offers

ROOT = Path(__file__).parents[3]
GPU_OPS = [candidate.op for candidate in offers.CANDIDATES]


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    offers.refusal.cache_clear()
    yield
    offers.refusal.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An H200 with a Triton on which all goes well."""
    triton = ModuleType("triton")
    triton.__version__ = "3.6.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(offers, "_trial", lambda: None)
    return monkeypatch


def test_where_all_goes_well_it_serves(gpu: pytest.MonkeyPatch) -> None:
    assert offers.refusal() is None
    for version in ("3.6.0+git1234", "3.10.1", "4.0.0"):
        gpu.setattr(sys.modules["triton"], "__version__", version)
        offers.refusal.cache_clear()
        assert offers.refusal() is None


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"),
    [
        (torch.version, "hip", "6.4", "written for NVIDIA GPUs"),
        (torch.cuda, "is_available", lambda: False, "no GPU here"),
        (torch.cuda, "get_device_capability", lambda: (7, 5), "needs compute capability 8.0, this GPU has 7.5"),
        (offers, "_trial", lambda: "does not run: no gcc", "does not run: no gcc"),
    ],
)
def test_what_is_missing_is_said(gpu: pytest.MonkeyPatch, where: Any, name: str, value: object, reason: str) -> None:
    gpu.setattr(where, name, value)
    assert offers.refusal() == reason
    [candidate] = [candidate for candidate in offers.CANDIDATES if candidate.op == "rms_norm"]
    assert candidate.offer("cuda", torch.bfloat16) == Refused(reason)


def test_a_triton_that_is_too_old_or_not_there(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(sys.modules["triton"], "__version__", "3.5.1")
    assert offers.refusal() == "needs version 3.6, this is 3.5.1"
    offers.refusal.cache_clear()
    gpu.setitem(sys.modules, "triton", None)
    assert str(offers.refusal()).startswith("cannot be imported: ")


def test_a_machine_on_which_kernels_do_not_run_says_so() -> None:
    """Here they are meant for a GPU, which is not there."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    pytest.importorskip("triton")
    assert str(offers._trial()).startswith("does not run: ")


@pytest.mark.parametrize("op", GPU_OPS)
def test_each_op_has_its_function(op: str, gpu: pytest.MonkeyPatch) -> None:
    gpu.undo()
    pytest.importorskip("triton")
    gpu.setattr(offers, "refusal", lambda: None)
    [candidate] = [candidate for candidate in offers.CANDIDATES if candidate.op == op]
    served = [
        dtype for dtype in (*offers.NUMBERS, *offers.BYTES) if isinstance(candidate.offer("cuda", dtype), Accepted)
    ]
    assert served in (list(offers.NUMBERS), list(offers.BYTES))
    offer = candidate.offer("cuda", served[0])
    assert isinstance(offer, Accepted) and getattr(offer.function, "__name__", op) == op and callable(getattr(ops, op))
    assert candidate.offer("cuda", torch.float64) == Refused("does not work on float64")
    assert candidate.offer("cpu", served[0]) == Refused("runs on a GPU, not on cpu")


@pytest.mark.parametrize("op", GPU_OPS)
def test_it_is_preferred_to_the_reference(op: str) -> None:
    names = [candidate.name for candidate in candidates(op)]
    assert names.index(offers.NAME) < names.index(reference.NAME)


def test_asking_needs_no_triton() -> None:
    """Providers are asked on every machine, also where it is not installed."""
    code = """
import sys
sys.modules["triton"] = None
from kernels.registry import Refused, candidates
import torch
[asked] = [candidate for candidate in candidates("rms_norm") if candidate.name == "Triton"]
assert isinstance(asked.offer("cpu", torch.float32), Refused)
assert isinstance(asked.offer("cuda", torch.float32), Refused)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
