"""What a model's code sees of a step. Implemented in `engine/runner`; passed down, never fetched from a global."""

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.ops import HostLengths


@dataclass(slots=True)
class ForwardBatch:
    """One step's rows, flattened: T tokens of B sequences, decode rows first. Filled by `runner/prepare.py` on a CPU,
    by `runner/device_inputs.py` on a GPU, by `runner/solo.py` before any request."""

    input_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]: absolute position of each token in its sequence"""
    slot_mapping: tuple[torch.Tensor, ...]
    """int64 [T] of each KV group: block id x block_size + offset, where K and V of the token go; -1: padding"""
    query_start: torch.Tensor
    """int32 [B + 1]: rows [query_start[b], query_start[b+1]) belong to sequence b"""
    seq_lens: torch.Tensor
    """int32 [B]: context length of sequence b including this step's tokens"""
    block_tables: tuple[torch.Tensor, ...]
    """int32 [B, max_blocks] of each KV group: blocks of sequence b in order; entries past its length, and in a windowed
    group those of blocks that none of its rows can see, are undefined"""
    logit_rows: torch.Tensor
    """int64 [S]: rows whose hidden state goes through the head"""
    adapter_slots: torch.Tensor | None = None
    """int32 [T]: LoRA adapter of each token, 0: none; None: no adapters at all"""
    lengths: HostLengths | None = None
    """What the host knows of `query_start` and `seq_lens`, of a captured step for all its replays; None: nothing"""


class KVStore(Protocol):
    """Writes K and V of a layer into the pool, in the layer's formats."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        """k, v: [T, kv_heads, head_dim], any row stride, model dtype."""


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Which layer attends, and how it makes weights of scores: see `kernels.ops.paged_attention`."""

    index: int
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """fp32 [heads]"""


class AttentionBackend(Protocol):
    """Attention of a step's queries over the pages, K and V read as they are stored."""

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Stores k and v, then attends causally.

        q: [T, heads, head_dim], rotated; k, v: [T, kv_heads, head_dim]; returns [T, heads * head_dim], model dtype.
        All rows' K and V are stored before any row attends.
        """
