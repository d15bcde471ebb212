from collections.abc import Callable, Iterator

import pytest

from kernels.threads import num_threads, set_threads


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for a test."""
    before = num_threads()
    yield set_threads
    set_threads(before)
