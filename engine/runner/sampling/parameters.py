"""Sampling parameters as columns over slots, copied once when a sequence enters its slot."""

import hashlib
import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.messages import NewRow
from engine.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it a temperature is greedy: dividing by it would leave one token anyway."""

Ids = npt.NDArray[np.int64]


class TokenCounts:
    """Which tokens a sequence holds and how often it generated each. Sparse: as long as its distinct tokens."""

    def __init__(self, prompt: Ids, output: Ids) -> None:
        distinct = np.unique(np.concatenate([prompt, output]))
        self.size = len(distinct)
        self._ids = np.zeros(2 * self.size + 16, np.int64)
        self._counts = np.zeros(2 * self.size + 16, np.int64)
        self._ids[: self.size] = distinct
        np.add.at(self._counts, np.searchsorted(distinct, output), 1)
        self._places = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> Ids:
        """Distinct tokens of prompt and output."""
        return self._ids[: self.size]

    @property
    def counts(self) -> Ids:
        """How often each of `ids` was generated; 0: in the prompt only."""
        return self._counts[: self.size]

    def add(self, token: int) -> None:
        """Counts a generated token."""
        place = self._places.setdefault(token, self.size)
        if place == self.size:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self.size += 1
        self._counts[place] += 1


@dataclass(slots=True)
class Extras:
    """What only some rows ask for: everything that changes logits before temperature."""

    bias_ids: Ids
    bias_values: npt.NDArray[np.float32]
    allowed_ids: Ids | None
    banned_ids: Ids
    """Bad words of one token."""
    bad_sequences: list[tuple[int, ...]]
    """Bad words of two or more tokens."""
    stop_ids: Ids
    """Masked until the sequence has `min_length` tokens, prompt included."""
    min_length: int
    repetition: float
    presence: float
    frequency: float
    counts: TokenCounts | None = field(default=None)
    """Present where one of the penalties is on."""


class SamplingColumns:
    """`slots` in, parameters out; `plain` rows (greedy, nothing else) need an argmax only."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._secret = os.urandom(16)
        self.plain = np.ones(max_num_seqs, np.bool_)
        self.on_device = np.ones(max_num_seqs, np.bool_)
        """Asks for nothing but what `kernels.ops.draw` does."""
        self.greedy = np.ones(max_num_seqs, np.bool_)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.index = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, np.int64)
        """-1: none asked for."""
        self.extras: dict[int, Extras] = {}

    def admit(self, row: NewRow) -> None:
        """Raises `InvalidRequest` for token ids outside the vocabulary; the slot is then as after `release`."""
        slot, params = row.slot, row.params
        self.release(slot)
        params.check_vocabulary(self.vocab_size)
        extras = self._extras(row)
        if extras is not None:
            self.extras[slot] = extras
        self.greedy[slot] = params.temperature < MIN_TEMPERATURE
        self.temperature[slot] = max(params.temperature, MIN_TEMPERATURE)
        self.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[slot], self.min_p[slot] = params.top_p, params.min_p
        self.seed[slot], self.index[slot] = self._seed(row), row.index
        self.num_logprobs[slot] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        self.num_prompt_logprobs[slot] = min(params.prompt_logprobs or 0, self.vocab_size)
        self.on_device[slot] = extras is None and params.logprobs is None
        self.plain[slot] = self.greedy[slot] and self.on_device[slot]

    def release(self, slot: int) -> None:
        self.extras.pop(slot, None)
        self.plain[slot] = self.on_device[slot] = self.greedy[slot] = True
        self.num_logprobs[slot] = -1

    def record(self, slots: list[int], token_ids: list[int]) -> None:
        """Tells the rows that count tokens what was drawn."""
        for slot, token in zip(slots, token_ids, strict=True) if self.extras else ():
            extras = self.extras.get(slot)
            if extras is not None and extras.counts is not None:
                extras.counts.add(token)

    def _extras(self, row: NewRow) -> Extras | None:
        params = row.params
        penalised = params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)
        if not (params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_tokens or penalised):
            return None
        bias = params.logit_bias or {}
        extras = Extras(
            bias_ids=np.array(list(bias), np.int64),
            bias_values=np.array(list(bias.values()), np.float32),
            allowed_ids=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64),
            banned_ids=np.array([word[0] for word in params.bad_words if len(word) == 1], np.int64),
            bad_sequences=[word for word in params.bad_words if len(word) > 1],
            stop_ids=self._stop_ids(params),
            min_length=row.num_prompt_tokens + params.min_tokens,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
        if penalised:
            token_ids = np.array(row.token_ids, np.int64)
            extras.counts = TokenCounts(token_ids[: row.num_prompt_tokens], token_ids[row.num_prompt_tokens :])
        return extras

    def _stop_ids(self, params: SamplingParams) -> Ids:
        ids = set(params.stop_token_ids) | set(() if params.ignore_eos else self._eos_token_ids)
        return np.array(sorted(token for token in ids if token < self.vocab_size), np.int64)

    def _seed(self, row: NewRow) -> int:
        """64 bits. Without a seed it comes from the request's id, so that a preempted request draws on as before."""
        if row.params.seed is not None:
            return row.params.seed % 2**64
        digest = hashlib.blake2b(row.request_id.encode(), key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "little")
