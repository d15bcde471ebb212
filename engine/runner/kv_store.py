"""The KV pools' memory, and what writes K and V into them."""

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import torch

from configs.errors import StartupError
from configs.kv import KVLayout, LayerKV
from engine.kv_scales import KVScales
from engine.model.interface import ForwardBatch
from kernels import ops

HUGE_PAGE = 2 * 1024 * 1024
KVTransforms = tuple[ops.KVTransform, ops.KVTransform]
"""(of K, of V) of a layer."""
UNTRANSFORMED: KVTransforms = (ops.NO_TRANSFORM, ops.NO_TRANSFORM)


def static_transforms(scales: KVScales, layers: Sequence[LayerKV], device: torch.device) -> list[KVTransforms]:
    """What stores of `layers`, which the scales fit (`KVScales.check`), divide by, on the device. Halves whose format
    has scales of its own get none."""
    found = []
    for layer, both in zip(layers, scales.layers, strict=True):
        k, v = (
            ops.KVTransform(torch.from_numpy(numbers).to(device))
            if layer.static and format.may_be_static
            else ops.NO_TRANSFORM
            for format, numbers in zip(layer.formats, both, strict=True)
        )
        found.append((k, v))
    return found


def allocate_pool(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_blocks, block_bytes], zeroed. Raises `StartupError` if there is not so much memory.

    On the CPU: 2 MiB aligned, in transparent huge pages where the system has them; it commits memory when a block is
    first written, or before (`CommittedAhead`). Elsewhere torch allocates, and all of it is committed at once.
    """
    size = num_blocks * block_bytes
    try:
        if device.type == "cpu":
            return _host_memory(size).view(num_blocks, block_bytes)
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    except (OSError, ValueError, OverflowError, torch.OutOfMemoryError) as error:
        raise StartupError(
            f"A KV pool of {num_blocks} blocks ({size / 2**30:.2f} GiB) cannot be allocated "
            f"({str(error).split('. ')[0]}): lower --kv-cache-memory-bytes, --num-gpu-blocks-override or "
            "--gpu-memory-utilization."
        ) from error


def _host_memory(size: int) -> torch.Tensor:
    whole = np.frombuffer(_anonymous(size + HUGE_PAGE), np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return torch.from_numpy(whole[start : start + size])


def _anonymous(size: int) -> mmap.mmap:
    """Zeroed private memory. A mapping that is shared (the default of `mmap`) would never get huge pages."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class CommittedAhead:
    """Has the system provide a pool's memory in idle time, some way ahead of the highest block in use: a step that
    writes to a page for the first time would wait for it. (In a virtual machine, where its host has to find the memory
    too, that took a tenth of the time of a long prompt.)"""

    AHEAD, PIECE = 1 << 30, 2 << 20
    """Bytes: how far ahead, and how much at once, while no other thread may change the memory's map."""
    MADV_POPULATE_WRITE = 23
    """Linux 5.14. It changes nothing that is in the pages; other systems refuse it, and pages come as they are used."""

    def __init__(self, pool: torch.Tensor) -> None:
        """pool: uint8 [blocks, block_bytes], as `allocate_pool` gives it for the CPU."""
        self._pool = pool
        self._wanted = self._committed = 0
        self._madvise = getattr(ctypes.CDLL(None), "madvise", None)
        self._thread: threading.Thread | None = None
        self.reach(-1)

    def reach(self, block: int) -> None:
        """This block is about to be used."""
        end = min(self._pool.nbytes, (block + 1) * self._pool.shape[1] + self.AHEAD)
        if end <= self._wanted or self._madvise is None:
            return
        self._wanted = end
        if self._thread is None or not self._thread.is_alive():  # one that is about to end leaves the rest to the next
            self._thread = threading.Thread(target=self._commit, name="kv-pool", daemon=True)
            self._thread.start()

    def _commit(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a thread has a priority of its own on Linux only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while self._committed < self._wanted and self._madvise is not None:
            address = ctypes.c_void_p(self._pool.data_ptr() + self._committed)  # a multiple of PIECE, so of a page
            size = min(self.PIECE, self._pool.nbytes - self._committed)
            if self._madvise(address, ctypes.c_size_t(size), self.MADV_POPULATE_WRITE):
                self._madvise = None
            self._committed += size


class PagedStore:
    """`KVStore` of all formats, over pools in a layout."""

    def __init__(
        self, pools: Sequence[torch.Tensor], layout: KVLayout, transforms: Sequence[KVTransforms] | None = None
    ) -> None:
        """`pools`: one for each KV group; `transforms`: one for each of the model's layers; None: nothing is done."""
        self.groups = tuple(group for group, _ in layout.places)
        """The KV group of each of the model's layers."""
        self.pages = tuple(
            ops.LayerPages(pools[group], layout.groups[group].spec, index, *of_layer)
            for (group, index), of_layer in zip(
                layout.places, transforms or [UNTRANSFORMED] * layout.num_layers, strict=True
            )
        )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        """k, v: [T, kv_heads, head_dim], any row stride, model dtype."""
        ops.store_kv(k, v, self.pages[layer], batch.slot_mapping[self.groups[layer]])
