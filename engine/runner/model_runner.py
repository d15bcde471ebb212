"""Owns the KV pools, the request rows and the model: applies a plan's differences, then runs its tokens.

What does not belong here: choosing tokens (`sampling/`), what to run (`engine/core`), how K and V are stored
(`kv_store.py`) and how attention reads them (`attention/`, `refresh.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from configs.kv import KVFormat, KVLayout
from configs.limits import SchedulerLimits
from configs.model import ModelConfig
from engine.messages import StepPlan
from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend
from engine.runner.attention.paged import PagedAttention
from engine.runner.kv_store import CommittedAhead, KVTransforms, PagedStore, allocate_pool
from engine.runner.prepare import BatchBuilder
from engine.runner.recorded import RecordedModel
from engine.runner.refresh import RefreshAttention
from engine.runner.request_rows import RequestRows
from kernels import ops
from kernels.registry import AUTO

CPU = torch.device("cpu")


@dataclass(frozen=True)
class CacheUse:
    """How K and V are kept and read."""

    transforms: Sequence[KVTransforms] | None = None
    """Of `PagedStore`."""
    plain: KVFormat | None = None
    """The format of the model's own numbers, in which sequences are refreshed; None: none ever is."""
    backend: str = AUTO
    """Of `ops.paged_attention`."""


UNCHANGED = CacheUse()


class ModelRunner:
    """One model on one device. One thread calls, once a step, `enter`, `copy_blocks` and `forward`, in this order.

    `forward` is the CPU's way. A device that the host runs ahead of is told by `ahead.AheadExecutor` to copy and to
    compute, of a step whose rows have entered.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        layout: KVLayout,
        num_pages: Sequence[int],
        limits: SchedulerLimits,
        device: torch.device = CPU,
        use: CacheUse = UNCHANGED,
    ) -> None:
        """model: an `engine.model.base.CausalLM`, or what has its `hidden` and `logits`; num_pages: of each group;
        device: where the model's weights are.

        `StartupError` if the pools do not fit.
        """
        self.model, self.config, self.limits = model, config, limits
        self.pools = tuple(
            allocate_pool(count, group.spec.block_bytes, device)
            for count, group in zip(num_pages, layout.groups, strict=True)
        )
        """uint8 [pages, block_bytes] of each KV group"""
        self._committed = [CommittedAhead(pool) for pool in self.pools if device == CPU]
        self.rows = RequestRows(limits.max_num_seqs, limits.max_model_len, layout.block_size, len(self.pools))
        self.attention = PagedAttention(PagedStore(self.pools, layout, use.transforms), layout, use.backend)
        self.refresh: RefreshAttention | None = None
        """For the rows of `plan.refreshed_slots`."""
        if use.plain is not None:
            self.refresh = RefreshAttention(self.attention, layout, use.plain, limits.max_model_len, device)

    @cached_property
    def _builder(self) -> BatchBuilder:
        return BatchBuilder(self.rows, self.limits.max_num_batched_tokens)

    @cached_property
    def _recorded(self) -> RecordedModel:
        return RecordedModel(self.model, self._builder.largest())

    def enter(self, plan: StepPlan) -> None:
        """What the plan does to the rows: freed slots, new rows, new blocks, in this order. Without tiers there are no
        transfers."""
        assert not plan.transfers, plan.transfers
        for slot in plan.freed_slots:
            self.rows.release(slot)
        for row in plan.new_rows:
            self.rows.admit(row, self.config.vocab_size)
            self._reach(row.block_ids)
        for slot, block_ids in plan.new_blocks:
            self.rows.append_blocks(slot, block_ids)
            self._reach(block_ids)

    @torch.inference_mode()
    def copy_blocks(self, plan: StepPlan) -> None:
        """What the plan does to the pools before anything of its step is written."""
        for number, pool in enumerate(self.pools if plan.copies else ()):
            pairs = [(source, destination) for group, source, destination in plan.copies if group == number]
            if pairs and pool.shape[1]:
                ops.copy_blocks(pool, pairs)

    def _reach(self, block_ids: Sequence[Sequence[int]]) -> None:
        for committed, ids in zip(self._committed, block_ids, strict=False):  # on a GPU there are none
            committed.reach(max(ids, default=-1))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """What the head reads, [S, hidden]: of the sampling rows in plan order, then of the rows of `plan.scored_slots`
        that a prompt token follows, slot by slot. None where no row brings anything.

        The rows' `num_computed` moves only when the model has succeeded.
        """
        for slot in plan.refreshed_slots:
            assert self.refresh is not None, "no scratch"
            self._compute(plan.rows_of([slot]), self.refresh)
        if plan.refreshed_slots:
            plan = plan.rows_of(set(plan.slots) - set(plan.refreshed_slots))
        return self._compute(plan, self.attention) if plan.slots else None

    def _compute(self, plan: StepPlan, attention: AttentionBackend) -> torch.Tensor:
        hidden = self._recorded.hidden(self._builder.build(plan), attention)
        self.rows.num_computed[plan.slots] += plan.num_tokens
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab], row by row, in fp32 or the model's dtype."""
        logits: torch.Tensor = self.model.logits(hidden)
        return logits
