"""The executor of one process and the CPU, and what it shares with that of a device (`ahead`)."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.messages import NewRow, PromptScores, RowResult, StepPlan, StepResult
from engine.ports import Masks
from engine.runner.model_runner import ModelRunner
from engine.runner.request_rows import Slots
from engine.runner.sampling.sampler import Sampler

log = logging.getLogger(__name__)


class ModelExecutor(ABC):
    """`engine.ports.Executor` on a `ModelRunner`: rows that come and go, and tokens that the host draws."""

    def __init__(self, runner: ModelRunner, eos_token_ids: tuple[int, ...]) -> None:
        self.runner, self.rows = runner, runner.rows
        self.sampler = Sampler(runner.rows, runner.config.vocab_size, eos_token_ids)

    @abstractmethod
    def forward(self, plan: StepPlan) -> Any:
        """Applies the plan and runs the model. Raises what the model raises; the rows have then computed nothing."""

    @abstractmethod
    def sample(self, handle: Any, masks: Masks | None) -> StepResult:
        """One token for each sampling row, or why it has none."""

    @abstractmethod
    def logits_of(self, handle: Any) -> torch.Tensor:
        """[sampling rows, vocab] of a step that has been launched and not sampled: waits for it."""

    @abstractmethod
    def shutdown(self) -> None:
        """Drops the steps in flight. Safe to call twice; memory goes with the last reference to the runner."""

    def logits_here(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, vocab] on the CPU."""
        return self.runner.logits(hidden)

    def _enter(self, plan: StepPlan) -> None:
        """What the plan does to the rows, their sampling parameters among it."""
        for slot in plan.freed_slots:
            self.sampler.columns.release(slot)
        self.runner.enter(plan)
        for row in plan.new_rows:
            self._admit(row)

    def _admit(self, row: NewRow) -> None:
        """A row that cannot be sampled as asked fails alone, when its first token is due."""
        try:
            self.sampler.columns.admit(row)
        except Exception as error:
            log.warning("sampling parameters of request %s refused", row.request_id, exc_info=True)
            self.rows.faults.setdefault(row.slot, str(error))

    def _draw(self, logits: torch.Tensor, slots: Slots, masks: Masks | None) -> list[RowResult]:
        """Draws and appends to the rows. logits: [S, vocab], row i of slot slots[i]; S > 0."""
        assert logits.shape[0] == len(slots), logits.shape
        sampled = self.sampler.sample(logits, slots, masks)
        numbers, token_ids = slots.tolist(), sampled.token_ids.tolist()
        results = [RowResult(slot, [token]) for slot, token in zip(numbers, token_ids, strict=True)]
        for place, logprobs in sampled.logprobs.items():
            results[place].logprobs = [logprobs]
        for place, message in sampled.faults.items():
            self.rows.faults.setdefault(numbers[place], message)
        # A failed row gets a token as well; nobody sees it, and a late step may still compute it.
        self.rows.append_tokens(slots, sampled.token_ids)
        self.sampler.columns.record(numbers, token_ids)
        return results

    def _fail(self, results: list[RowResult]) -> None:
        """Turns the results of rows with faults into errors."""
        for result in results if self.rows.faults else ():
            fault = self.rows.faults.get(result.slot)
            if fault is not None:
                result.token_ids, result.logprobs, result.error = [], None, fault

    @torch.inference_mode()
    def _score(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, PromptScores]:
        """Log-probabilities of the prompt tokens that follow the rows of `plan.scored_slots`; hidden: those rows'.

        The head goes over a bounded number of rows at a time: logits of a whole chunk would be vocabulary times chunk.
        """
        scores: dict[int, PromptScores] = {}
        start = 0
        for slot in plan.scored_slots:
            end = min(int(self.rows.num_computed[slot]), int(self.rows.num_prompt[slot]) - 1)
            first = int(self.rows.num_computed[slot]) - plan.num_tokens[plan.slots.index(slot)] + 1
            following = self.rows.token_ids[slot, first : end + 1].astype(np.int64)
            rows, start = hidden[start : start + len(following)], start + len(following)
            num_top = self.sampler.columns.num_prompt_logprobs[slot]
            try:
                found = self.sampler.score(rows, self.logits_here, following, int(num_top))
                scores[slot] = PromptScores(first, found)
            except Exception as error:
                log.warning("a prompt could not be scored", exc_info=True)
                scores[slot] = PromptScores(first, [], str(error))
        assert start == hidden.shape[0], (start, hidden.shape)
        return scores


@dataclass(slots=True)
class StepHandle:
    """A step between `forward` and `sample`."""

    step: int
    slots: Slots
    """The sampling rows, in plan order."""
    logits: torch.Tensor | None
    """Of the sampling rows."""
    scores: dict[int, PromptScores]
    result: StepResult | None = None


class SingleExecutor(ModelExecutor):
    """Rows, model and sampler in a line.

    With overlap, `forward` of the next step comes before `sample` of this one: it first draws this step's tokens into
    the rows, where the next step's inputs are read. So a step with grammar masks must be sampled before the next
    `forward`; what was drawn without them cannot be taken back.
    """

    def __init__(self, runner: ModelRunner, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__(runner, eos_token_ids)
        self._open: StepHandle | None = None
        """The last step, until its tokens are drawn."""

    def forward(self, plan: StepPlan) -> StepHandle:
        if self._open is not None:
            self._finish(self._open, None)
        self._enter(plan)
        self.runner.copy_blocks(plan)
        hidden = self.runner.forward(plan)
        sampling = sampling_slots(plan)
        logits = self.runner.logits(hidden[: len(sampling)]) if hidden is not None and len(sampling) else None
        scores = {} if hidden is None else self._score(plan, hidden[len(sampling) :])
        self._open = StepHandle(plan.step, sampling, logits, scores)
        return self._open

    def sample(self, handle: StepHandle, masks: Masks | None) -> StepResult:
        if handle.result is None:
            return self._finish(handle, masks)
        if masks:
            raise ValueError(f"step {handle.step} was drawn before its grammar masks came")
        return handle.result

    def logits_of(self, handle: StepHandle) -> torch.Tensor:
        assert handle.logits is not None, "none, or drawn from"
        return handle.logits

    def shutdown(self) -> None:
        self._open = None

    @torch.inference_mode()
    def _finish(self, handle: StepHandle, masks: Masks | None) -> StepResult:
        """Draws, appends to the rows, and lets the logits go."""
        logits = handle.logits
        handle.logits = self._open = None
        results = [] if logits is None else self._draw(logits, handle.slots, masks)
        self._fail(results)
        handle.result = StepResult(handle.step, results, handle.scores)
        return handle.result


def sampling_slots(plan: StepPlan) -> Slots:
    return np.array([slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples], np.int64)
