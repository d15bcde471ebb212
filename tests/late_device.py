"""A device on the CPU that is as late as it may be, for what runs ahead of one.

What it is told it only notes down: it is done, in order, when somebody waits for it, or a little now and then, at
random. So whatever the host reads too early has not been written, whatever it overwrites too early is sent wrong, and a
number that was asked of a tensor between two launches is an old one.

A capture is replayed without Python: torch's operations are noted down with the tensors they got, and done again on the
same memory. An argument that Python computed is what it was when captured; a tensor that came later is never seen.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POISON = 0x7FF4_DEAD_7FC0_BEEF
"""As int64 far outside of everything, as int32 too; as fp32 a NaN (the lower half)."""

ASKING = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")


class LateDevice:
    """`engine.runner.link.Link`."""

    def __init__(self, seed: int | None = None) -> None:
        """seed: of how often it does something without being waited for; None: never."""
        self._random = None if seed is None else Random(seed)
        self._told: list[Callable[[], None]] = []
        self._done = 0
        self.num_sends = self.num_replays = self.num_launches = 0

    # ---------------------------------------------------------------- the link
    def buffer(self, words: int) -> torch.Tensor:
        return torch.full((words,), POISON)

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> Callable[[], None]:
        self.num_sends += 1
        number = self._tell(lambda: destination.copy_(source))

        def wait() -> None:
            self.catch_up(number)
            source.fill_(POISON)

        return wait

    def launch(self, work: Callable[[], None]) -> None:
        self.num_launches += 1
        self._tell(work)

    def fetch(self, source: torch.Tensor) -> Callable[[], torch.Tensor]:
        copy = torch.full(source.shape, POISON, dtype=source.dtype)
        number = self._tell(lambda: copy.copy_(source))

        def wait() -> torch.Tensor:
            self.catch_up(number)
            return copy

        return wait

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.catch_up()
        work()
        with torch.inference_mode(), _Notes() as notes:
            work()

        def replay() -> None:
            self.num_replays += 1
            self._tell(notes.replay)

        return replay

    def bytes_in_use(self) -> int:
        return 0

    # ---------------------------------------------------------------- the device
    @property
    def num_waiting(self) -> int:
        """What it was told and has not done."""
        return len(self._told) - self._done

    @torch.inference_mode()
    def catch_up(self, number: int | None = None) -> None:
        """Does what it was told, in order, up to that number; None: all."""
        while self._done < (len(self._told) if number is None else number):
            work = self._told[self._done]
            self._told[self._done] = _nothing
            self._done += 1
            work()

    def _tell(self, work: Callable[[], Any]) -> int:
        self._told.append(work)
        if self._random is not None:
            self.catch_up(min(len(self._told), self._done + self._random.choice([0, 0, 0, 1, 2, 9])))
        return len(self._told)


class _Notes(TorchDispatchMode):
    """Torch's operations on tensors, with what they were given. Results keep their memory from replay to replay."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name() not in ASKING, "a number was asked of the device while it was captured"
        by_mask = func.name() == "aten::index.Tensor" and any(x is not None and x.dtype == torch.bool for x in args[1])
        assert not by_mask and func.name() != "aten::nonzero", "a shape was asked of the device while it was captured"
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and _memory(old) not in given:
                    old.copy_(new)


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _nothing() -> None:
    """It is done."""
