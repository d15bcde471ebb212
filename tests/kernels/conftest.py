from collections.abc import Callable, Iterator

import pytest
from flash_library import FlashLibrary, on_a_gpu

from kernels.threads import num_threads, set_threads


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for a test."""
    before = num_threads()
    yield set_threads
    set_threads(before)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashLibrary]:
    """As `on_a_gpu`."""
    with on_a_gpu(monkeypatch) as library:
        yield library
