"""Owns the KV pool, the request rows and the model: applies a plan's differences, then runs its tokens.

What does not belong here: choosing tokens (`sampling/`), what to run (`engine/core`), how K and V are stored
(`kv_store/`) and how attention reads them (`attention/`).
"""

import torch
from torch import nn

from configs.kv import KVSpec
from configs.limits import SchedulerLimits
from configs.model import ModelConfig
from engine.messages import StepPlan
from engine.runner.attention.paged import PagedAttention
from engine.runner.kv_store.plain import PlainStore, allocate_pool
from engine.runner.prepare import BatchBuilder
from engine.runner.request_rows import RequestRows
from kernels import ops


class ModelRunner:
    """One model on one device. `apply` and `forward` are called in turn, once a step, by one thread."""

    def __init__(
        self, model: nn.Module, config: ModelConfig, spec: KVSpec, num_blocks: int, limits: SchedulerLimits
    ) -> None:
        """model: `engine.model.base.CausalLM`, or what is called like it. `StartupError` if the pool does not fit."""
        self.model, self.config, self.spec, self.limits = model, config, spec, limits
        self.pool = allocate_pool(num_blocks, spec.block_bytes)
        self.rows = RequestRows(limits.max_num_seqs, limits.max_model_len, spec.block_size)
        self.attention = PagedAttention(PlainStore(self.pool, spec), config.head_dim**-0.5)
        self._builder = BatchBuilder(self.rows, limits.max_num_batched_tokens)

    def apply(self, plan: StepPlan) -> None:
        """Freed slots, new rows, new blocks, copies: in this order. Without tiers there are no transfers."""
        assert not plan.transfers, plan.transfers
        for slot in plan.freed_slots:
            self.rows.release(slot)
        for row in plan.new_rows:
            self.rows.admit(row, self.config.vocab_size)
        for slot, block_ids in plan.new_blocks:
            self.rows.append_blocks(slot, block_ids)
        if plan.copies:
            ops.copy_blocks(self.pool, plan.copies)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits [S, vocab] of the sampling rows in plan order, model dtype; None where the plan computes nothing.

        The rows' `num_computed` moves only when the model has succeeded.
        """
        if not plan.slots:
            return None
        logits: torch.Tensor = self.model(self._builder.build(plan), self.attention)
        self.rows.num_computed[plan.slots] += plan.num_tokens
        return logits
