"""The executor of a device that the host runs ahead of: it draws where it computes, and nothing waits.

    forward(N+1)   rows move ─> one copy ─> model, head, draw ─> tokens on the device ─> a copy back is under way
    sample(N)      waits for step N's copy, while N+1 computes

A sequence's length moves when its step is launched; its token follows when it has arrived. Until then the next step
finds it on the device (`device_inputs`). The draw is `kernels.ops.draw`: by Gumbel-max, from the request's seed, the
choice and the token's position; so a seed gives other tokens than `sampling.sampler` draws on a CPU, and always the
same ones here.

What the device does not draw is drawn by the host, from logits that are copied to it: rows with log-probabilities,
penalties, bias, bad words, allowed tokens or min_tokens. A step with such a row, or with scores of a prompt, is
finished before the next one is launched: the device idles for as long as that and the launch take, for everybody. The
head reads its weights once more for those rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import RowResult, StepPlan, StepResult
from engine.model.interface import AttentionBackend
from engine.ports import Masks
from engine.runner.device_inputs import DeviceInputs, DeviceStep
from engine.runner.executor import ModelExecutor, sampling_slots
from engine.runner.graphs import DecodeGraphs
from engine.runner.link import Link, Work
from engine.runner.model_runner import ModelRunner
from engine.runner.request_rows import Slots
from engine.runner.sampling.sampler import NON_FINITE
from kernels import ops

NO_ROWS = StepPlan(
    step=-1, slots=[], num_tokens=[], samples=[], new_rows=[], new_blocks=[], copies=[], transfers=[], freed_slots=[]
)


@dataclass(slots=True, eq=False)
class AheadHandle:
    """A step between `forward` and `sample`."""

    plan: StepPlan
    """Without the rows that were refreshed."""
    slots: Slots
    """The sampling rows, in plan order."""
    on_host: npt.NDArray[np.bool_]
    """Which of them the host draws."""
    places: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of the others: where in their sequences the tokens will stand."""
    hidden: torch.Tensor | None = None
    """What the head reads, once the device has computed it; of a captured step until the next one is launched."""
    tokens: Callable[[], torch.Tensor] | None = None
    """Waits for the step; int64 [sampling rows]."""
    result: StepResult | None = None

    @property
    def needs_host(self) -> bool:
        return bool(self.on_host.any() or self.plan.scored_slots)


class AheadExecutor(ModelExecutor):
    """`engine.ports.Executor` for a device; several steps may be unfinished, and are sampled in order.

    A row that the device has drawn cannot be masked any more: masks for one are refused.
    """

    def __init__(self, runner: ModelRunner, eos_token_ids: tuple[int, ...], device: torch.device, link: Link) -> None:
        super().__init__(runner, eos_token_ids)
        limits, config = runner.limits, runner.config
        self.link = link
        self.graphs = DecodeGraphs(link)
        self._inputs = DeviceInputs(
            runner.rows, self.sampler.columns, config.vocab_size, limits.max_num_batched_tokens, device, link
        )
        self._drawn = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        """The last step's tokens, in the order of its sampling rows; -1: no finite maximum"""
        self._captured_hidden: torch.Tensor | None = None
        """Of all graphs: what the head has read in the last one launched"""
        self._behind: AheadHandle | None = None
        """The last step, while it needs the host."""

    def capture(self, sizes: Sequence[int]) -> None:
        """Has decode steps of these sizes launched whole from now on. After the warm-up, before any request."""
        self.graphs.capture(sizes, self._decode_of)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> AheadHandle:
        """Launches the step and returns; the rows have then computed it."""
        if self._behind is not None:
            self._finish(self._behind, None)
        self._enter(plan)
        if plan.copies:
            self.link.launch(partial(self.runner.copy_blocks, plan))
        for slot in plan.refreshed_slots:
            assert self.runner.refresh is not None, "no scratch"
            self._launch(self._handle(plan.rows_of([slot])), self.runner.refresh)
        if plan.refreshed_slots:
            plan = plan.rows_of(set(plan.slots) - set(plan.refreshed_slots))
        handle = self._handle(plan)
        if plan.slots:
            self._launch(handle, self.runner.attention)
        handle.places = self.rows.expect_tokens(handle.slots[~handle.on_host])
        handle.tokens = self.link.fetch(self._drawn[: len(handle.slots)])
        self._behind = handle if handle.needs_host else None
        return handle

    def sample(self, handle: AheadHandle, masks: Masks | None) -> StepResult:
        """Waits for the step."""
        if masks and (handle.result is not None or any(slot in masks for slot in handle.slots[~handle.on_host])):
            raise ValueError(f"step {handle.plan.step} was drawn before its grammar masks came")
        return self._finish(handle, masks) if handle.result is None else handle.result

    @torch.inference_mode()
    def logits_of(self, handle: AheadHandle) -> torch.Tensor:
        assert handle.tokens is not None, "finished"
        handle.tokens()
        assert handle.hidden is not None
        return self.runner.logits(handle.hidden[: len(handle.slots)])

    def logits_here(self, hidden: torch.Tensor) -> torch.Tensor:
        """Waits. Into page-locked memory, which takes a tenth of the time that other memory does."""
        return self.link.fetch(self.runner.logits(hidden))()

    def shutdown(self) -> None:
        self._behind = None

    # ---------------------------------------------------------------- launching
    def _handle(self, plan: StepPlan) -> AheadHandle:
        slots = sampling_slots(plan)
        return AheadHandle(plan, slots, ~self.sampler.columns.on_device[slots])

    def _launch(self, handle: AheadHandle, attention: AttentionBackend) -> None:
        plan = handle.plan
        size = self.graphs.size_for(plan)
        step = self._inputs.stage(plan, size)
        if size is None:
            self.link.launch(partial(self._compute, step, attention, handle))
        else:
            self.graphs.replay(size)
            handle.hidden = self._captured_hidden
        self.rows.num_computed[plan.slots] += plan.num_tokens

    @torch.inference_mode()
    def _compute(self, step: DeviceStep, attention: AttentionBackend, handle: AheadHandle) -> None:
        """Work for the device."""
        handle.hidden = self.runner.model.hidden(self._inputs.batch(step), attention)
        self._draw_there(step, handle.hidden)

    def _decode_of(self, size: int) -> Work:
        """A decode step of so many sequences, to be captured."""
        step = self._inputs.stage(NO_ROWS, size)

        @torch.inference_mode()
        def decode() -> None:
            hidden = self.runner.model.hidden(self._inputs.batch(step), self.runner.attention)
            if self._captured_hidden is None:  # the largest size comes first, and its work is done before it is noted
                self._captured_hidden = torch.empty_like(hidden)
            self._captured_hidden[:size].copy_(hidden)
            self._draw_there(step, hidden)

        return decode

    def _draw_there(self, step: DeviceStep, hidden: torch.Tensor) -> None:
        """hidden: what the head reads, of the rows that draw first."""
        count, asked = len(step.drawing_slots), step.draw
        if count:
            drawn = ops.draw(
                self.runner.logits(hidden[:count]),
                asked.temperature,
                asked.top_k,
                asked.top_p,
                asked.min_p,
                asked.seeds,
                asked.choices,
                asked.positions,
            )
            self._drawn[:count].copy_(drawn)
            self._inputs.keep(step, drawn)

    # ---------------------------------------------------------------- finishing
    @torch.inference_mode()
    def _finish(self, handle: AheadHandle, masks: Masks | None) -> StepResult:
        """Waits for the tokens, takes them into the rows, and does what the host has to do for the step."""
        if handle is self._behind:
            self._behind = None
        assert handle.tokens is not None and handle.result is None
        tokens, slots, on_device = handle.tokens().numpy(), handle.slots, ~handle.on_host
        results = [RowResult(slot, [token]) for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True)]
        self.rows.fill_tokens(slots[on_device], handle.places, tokens[on_device])
        for slot in slots[on_device & (tokens < 0)].tolist():
            self.rows.faults.setdefault(slot, NON_FINITE)
        scores = {}
        if handle.needs_host:
            assert handle.hidden is not None
            self._draw_here(handle, handle.hidden, masks, results)
            if handle.plan.scored_slots:
                scores = self._score(handle.plan, handle.hidden[len(slots) :])
        handle.hidden = handle.tokens = None
        self._fail(results)
        handle.result = StepResult(handle.plan.step, results, scores)
        return handle.result

    def _draw_here(
        self, handle: AheadHandle, hidden: torch.Tensor, masks: Masks | None, results: list[RowResult]
    ) -> None:
        """Puts what the host draws into the results."""
        rows = np.flatnonzero(handle.on_host)
        if len(rows):
            logits = self.logits_here(hidden[torch.from_numpy(rows).to(hidden.device)])
            for row, result in zip(rows.tolist(), self._draw(logits, handle.slots[rows], masks), strict=True):
                results[row] = result
