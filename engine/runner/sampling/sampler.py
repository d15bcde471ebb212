"""Logits to tokens. A row's token and log-probabilities depend on its own logits, parameters, seed and position: the
same bits alone, in company and in any order.

    logits ─> fp32 ─> processors ─> maximum to 0 ─> / temperature ─> exp, group sums ─> top-k, top-p, min-p ─> draw
       └─> log-probabilities of the raw logits, for rows that ask        (greedy rows: argmax after the processors)

All of it on the CPU, whatever computes the model. What is exact here, sums in a fixed order,
draws in float64 and sorts without ties left to chance, would need kernels of its own elsewhere. A device draws by
`kernels.ops.draw`, and leaves to this what that does not do (`runner.ahead`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.messages import TokenLogprobs
from engine.ports import Masks
from engine.runner.request_rows import RequestRows, Slots
from engine.runner.sampling.distribution import F64, Ids, draw, padded
from engine.runner.sampling.logprobs import token_logprobs
from engine.runner.sampling.parameters import SamplingColumns
from engine.runner.sampling.philox import uniforms
from engine.runner.sampling.processors import Constrained, process
from kernels import ops

CHUNK_BYTES = 8 * 2**20
"""fp32 logits worked on at a time: they stay in the CPU's caches, and memory does not grow with the batch."""

NON_FINITE = "The model's output is not finite (NaN or infinity) for this request."
NO_TOKEN_LEFT = "Bias, masks and penalties leave this request no token to choose, or none with a finite score."

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Sampled:
    """One entry for each row of logits."""

    token_ids: Ids
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, where asked for."""
    faults: dict[int, str] = field(default_factory=dict)
    """By row: why it has no token."""


class Sampler:
    """Keeps sampling parameters by slot and two chunks of scratch."""

    def __init__(self, rows: RequestRows, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.rows = rows
        self.vocab_size = vocab_size
        self.columns = SamplingColumns(rows.max_num_seqs, vocab_size, eos_token_ids)
        width = padded(vocab_size)
        self._chunk = max(1, min(rows.max_num_seqs, CHUNK_BYTES // (4 * width)))
        self._logits = torch.full((self._chunk, width), -torch.inf)
        self._work = torch.zeros((2, self._chunk, width))

    def sample(self, logits: torch.Tensor, slots: Slots, masks: Masks | None = None) -> Sampled:
        """logits: [S, vocab] on the CPU, any float dtype, row i of slot slots[i]; masks: see `engine.ports.Masks`.

        Never raises for one row's sake: should the whole fail, each row is tried alone and only those that fail again
        have faults. The rows' lengths tell the position of the token to draw; nothing is appended to them.
        """
        try:
            return self._sample(logits, slots, masks or {})
        except Exception as error:
            if len(slots) == 1:
                return Sampled(np.zeros(1, np.int64), faults={0: f"Sampling failed: {error}"})
            log.warning("sampling failed for a batch; its rows are tried one by one", exc_info=True)
        alone = [self.sample(logits[i : i + 1], slots[i : i + 1], masks) for i in range(len(slots))]
        return Sampled(
            np.concatenate([one.token_ids for one in alone]),
            {i: one.logprobs[0] for i, one in enumerate(alone) if one.logprobs},
            {i: one.faults[0] for i, one in enumerate(alone) if one.faults},
        )

    def score(
        self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], token_ids: Ids, num_top: int
    ) -> list[TokenLogprobs]:
        """What the rows of hidden [R, hidden] give to token_ids [R], with `num_top` alternatives each.

        head: [R, hidden] -> [R, vocab] on the CPU. Another device is asked for as many rows at a time as a step samples
        at most, since each time it reads all of the head's weights, and is waited for.

        Raises `ValueError` with words for the client where a row has no finite maximum.
        """
        found: list[TokenLogprobs] = []
        most = self._chunk if hidden.is_cpu else self.rows.max_num_seqs
        for first in range(0, len(token_ids), most):
            logits = head(hidden[first : first + most])
            for start in range(0, len(logits), self._chunk):
                ids = token_ids[first + start : first + min(start + self._chunk, len(logits))]
                x = self._load(logits, np.arange(start, start + len(ids)))
                if not np.isfinite(x.amax(dim=1).numpy()).all():
                    raise ValueError(NON_FINITE)
                found += token_logprobs(x, self._work[:, : len(x)], ids, np.full(len(ids), num_top))
        return found

    def _sample(self, logits: torch.Tensor, slots: Slots, masks: Masks) -> Sampled:
        columns = self.columns
        result = Sampled(np.zeros(len(slots), np.int64))
        fast = columns.plain[slots].all() and not masks
        # Greedy rows first, so that each chunk's random rows are one slice.
        order = np.arange(len(slots)) if fast else np.argsort(~columns.greedy[slots], kind="stable")
        for start in range(0, len(slots), self._chunk):
            places = order[start : start + self._chunk]
            if fast:
                self._argmax(self._load(logits, places), places, result)
            else:
                self._sample_chunk(logits, places, slots[places], masks, result)
        return result

    def _load(self, logits: torch.Tensor, places: Ids) -> torch.Tensor:
        """fp32 [len(places), width] in scratch."""
        x = self._logits[: len(places)]
        in_order = bool((np.diff(places) == 1).all())
        source = logits[places[0] : places[-1] + 1] if in_order else logits[torch.from_numpy(places)]
        x[:, : self.vocab_size] = source
        return x

    def _argmax(self, x: torch.Tensor, places: Ids, result: Sampled) -> None:
        """Lowest id of the maximum (numpy's promise); a NaN counts as the maximum."""
        array = x.numpy()
        tokens = array.argmax(axis=1)
        result.token_ids[places] = tokens
        for place in np.flatnonzero(~np.isfinite(array[np.arange(len(places)), tokens])):
            result.faults[int(places[place])] = NON_FINITE

    def _sample_chunk(self, logits: torch.Tensor, places: Ids, slots: Slots, masks: Masks, result: Sampled) -> None:
        x = self._load(logits, places)
        num_greedy = int(self.columns.greedy[slots].sum())
        self._refuse(x, places, NON_FINITE, result)
        if self._process(x, slots, masks):
            self._refuse(x, places, NO_TOKEN_LEFT, result)
        result.token_ids[places[:num_greedy]] = x[:num_greedy].numpy().argmax(axis=1)
        if num_greedy < len(places):
            result.token_ids[places[num_greedy:]] = self._draw(x[num_greedy:], slots[num_greedy:])
        self._logprobs(logits, places, slots, result)

    def _refuse(self, x: torch.Tensor, places: Ids, reason: str, result: Sampled) -> None:
        """Rows without a finite maximum become faults; they go on as zeros, so that nothing later meets a NaN."""
        for place in np.flatnonzero(~np.isfinite(x.amax(dim=1).numpy())):
            result.faults.setdefault(int(places[place]), reason)
            x[place, : self.vocab_size] = 0.0

    def _process(self, x: torch.Tensor, slots: Slots, masks: Masks) -> bool:
        """Applies what comes before temperature; False if no row wanted anything."""
        extras, rows = self.columns.extras, self.rows
        constrained = [
            Constrained(
                place=place,
                extras=extras[slot],
                output=rows.token_ids[slot, rows.num_prompt[slot] : rows.lengths[slot]],
                length=int(rows.lengths[slot]),
            )
            for place, slot in enumerate(slots.tolist())
            if slot in extras
        ]
        masked = [(place, masks[slot]) for place, slot in enumerate(slots.tolist()) if slot in masks]
        if constrained or masked:
            process(x.numpy(), constrained, masked, self.vocab_size)
        return bool(constrained or masked)

    def _draw(self, x: torch.Tensor, slots: Slots) -> Ids:
        """x: [R, width] with finite maxima; becomes logits over temperature, shifted to a maximum of 0."""
        columns = self.columns
        weights = self._work[0, : len(x)]
        sums = ops.softmax_weights(x, torch.from_numpy(columns.temperature[slots]), x, weights)
        uniform = uniforms(columns.seed[slots], columns.index[slots], self.rows.lengths[slots].astype(np.uint64))
        top_k, top_p, min_p = columns.top_k[slots], columns.top_p[slots], columns.min_p[slots]
        is_truncated = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
        token_ids = np.zeros(len(x), np.int64)
        if not is_truncated.all():
            cumulative: F64 = sums.numpy().cumsum(axis=1, dtype=np.float64)
            token_ids = draw(weights.numpy(), cumulative, uniform)
        rows = np.flatnonzero(is_truncated)
        if len(rows):
            limits = [torch.from_numpy(each[rows]) for each in (top_k, top_p, min_p, uniform)]
            token_ids[rows] = ops.draw_truncated(x, weights, torch.from_numpy(rows), *limits).numpy()
        return token_ids

    def _logprobs(self, logits: torch.Tensor, places: Ids, slots: Slots, result: Sampled) -> None:
        asked = np.flatnonzero(self.columns.num_logprobs[slots] >= 0)
        asked = asked[[int(places[place]) not in result.faults for place in asked]] if result.faults else asked
        if not len(asked):
            return
        chosen = places[asked]
        x = self._load(logits, chosen)
        num_top = self.columns.num_logprobs[slots[asked]]
        found = token_logprobs(x, self._work[:, : len(x)], result.token_ids[chosen], num_top)
        result.logprobs.update(zip(chosen.tolist(), found, strict=True))
