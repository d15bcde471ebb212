"""What several processes need and one makes."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels.cpu import library


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """One process after the other, of those that name this folder, which is made: the first makes what the others
    find."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def native_kernels(scratch: Path) -> str:
    """Whether there are those in C++, by which the host draws, in words. To compile them takes all cores a while."""
    with in_turn(scratch / "native"):
        return "ready" if library.load() is not None else str(library.refusal())
