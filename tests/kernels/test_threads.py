"""The kernels' threads: every part of every job is done once, whoever calls, however many there are."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.cpu import library
from kernels.threads import num_threads, set_threads

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(library.load() is None, reason=str(library.refusal()))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = num_threads()
    yield
    set_threads(before)


def layer(seed: int, rows: int) -> tuple[torch.Tensor, ops.PackedLinear]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1500, 400, generator=generator)
    return torch.randn(rows, 400, generator=generator), ops.pack_linear(weight)


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 64])
def test_any_number_of_threads(threads: int) -> None:
    x, packed = layer(0, 33)
    set_threads(1)
    expected = ops.linear(x, packed)
    set_threads(threads)
    for _ in range(50):
        assert torch.equal(ops.linear(x, packed), expected)


def test_several_callers_at_once() -> None:
    """Only one of them has the team; the others do their jobs by themselves."""
    set_threads(2)
    jobs = [layer(seed, 1 + 7 * seed) for seed in range(4)]
    expected = [ops.linear(x, packed) for x, packed in jobs]
    start = threading.Barrier(len(jobs))

    def call(index: int) -> bool:
        start.wait()
        x, packed = jobs[index]
        return all(torch.equal(ops.linear(x, packed), expected[index]) for _ in range(100))

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert all(pool.map(call, range(len(jobs))))


def test_a_forked_child_has_no_threads_and_does_it_alone() -> None:
    set_threads(2)
    x, packed = layer(1, 20)
    expected = ops.linear(x, packed)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ops.linear(x, packed), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_no_more_threads_are_started_than_asked_for() -> None:
    script = (
        "import os, torch; from kernels import ops; from kernels.threads import set_threads; set_threads(3);"
        "packed = ops.pack_linear(torch.randn(3000, 600)); x = torch.randn(40, 600);"
        "before = len(os.listdir('/proc/self/task')); [ops.linear(x, packed) for _ in range(20)];"
        "print(len(os.listdir('/proc/self/task')) - before <= 2)"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "True\n"


def test_where_no_thread_can_be_started_the_caller_does_it_all() -> None:
    drop = "import os; os.setgid(65534); os.setuid(65534);" if os.getuid() == 0 else ""  # root has no limit
    script = (
        "import resource, torch; from kernels import ops; from kernels.threads import set_threads;"
        "packed = ops.pack_linear(torch.randn(1500, 400)); x = torch.randn(33, 400);"
        "set_threads(1); expected = ops.linear(x, packed);"
        f"{drop} resource.setrlimit(resource.RLIMIT_NPROC, (1, 1));"
        "set_threads(4); found = ops.linear(x, packed); set_threads(1);"
        "print(torch.equal(found, expected))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "True\n"
