"""Kernels run in Triton's interpreter, on a CPU, each file of tests in a process of its own.

What TRITON_INTERPRET says counts when triton is imported and when kernels are defined, for good; and a wrong pointer
ends the process. So a file here is one test, which runs the file's own tests elsewhere. To see them one by one, or to
choose among them:

    TRITON_INTERPRET=1 pytest tests/kernels/triton/test_elementwise.py
"""

import importlib.util
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import interpreted
import pytest
import torch

NOT_INTERPRETED = ("test_offers.py", "test_compiles.py")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = list(NOT_INTERPRETED) if INTERPRETED else []


def pytest_configure(config: pytest.Config) -> None:
    """numpy warns of overflows and of divisions by zero, which a GPU computes with like any other number."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    if INTERPRETED:
        interpreted.improve()


@pytest.fixture(autouse=INTERPRETED)
def poisoned_memory() -> Iterator[None]:
    """New memory is full of NaN and of the largest integers: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan() and torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def far_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], torch.Tensor]:
    """Gives uint8 [n] of zeros, committed as it is touched, for offsets that do not fit into 32 bits.

    After each launch the interpreter copies all memory back to where it was, even where it never left.
    """
    from triton.runtime.interpreter import GridExecutor

    def take(size: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8)

    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *arguments: None)
    return take


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if INTERPRETED or module_path.name in NOT_INTERPRETED:
        return None
    return Elsewhere.from_parent(parent, path=module_path)


class Elsewhere(pytest.File):
    """A file whose tests are run by another process."""

    def collect(self) -> Iterator[pytest.Item]:
        yield Run.from_parent(self, name="interpreted")


class Failed(Exception):
    """What the other process printed."""


class Run(pytest.Item):
    """All tests of a file."""

    def runtest(self) -> None:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(self.path)]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(command, cwd=self.config.rootpath, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        return str(excinfo.value) if isinstance(excinfo.value, Failed) else str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, "in Triton's interpreter"
