"""All cores, whatever tests before have set: these are the long ones."""

from collections.abc import Iterator

import pytest
from engines import threads

from engine.device import usable_cores


@pytest.fixture(scope="package", autouse=True)
def all_cores() -> Iterator[None]:
    with threads(usable_cores()):
        yield
