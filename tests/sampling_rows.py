"""Rows to sample for, the sampler that serves them, and what plain per-row code makes of them. For tests."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from engine.messages import NewRow
from engine.runner.request_rows import RequestRows
from engine.runner.sampling.distribution import padded
from engine.runner.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams

EOS = (2, 5)
INF = math.inf
TOKENS = st.integers(0, 39)


@dataclass
class Row:
    """A sequence to sample for, and its logits."""

    logits: torch.Tensor
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: list[int] = field(default_factory=lambda: [1])
    output: list[int] = field(default_factory=list)
    index: int = 0
    request_id: str = "request"


def random_logits(vocab_size: int, seed: int, scale: float = 3.0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@st.composite
def constrained_rows(draw_):
    """A row of 40 logits with any combination of parameters."""
    options = {
        "temperature": draw_(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        "top_k": draw_(st.sampled_from([0, 0, 1, 3, 39, 40, 100])),
        "top_p": draw_(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01])),
        "min_p": draw_(st.sampled_from([0.0, 0.0, 0.1, 0.7])),
        "repetition_penalty": draw_(st.sampled_from([1.0, 1.3, 0.8])),
        "presence_penalty": draw_(st.sampled_from([0.0, 0.5, -1.0])),
        "frequency_penalty": draw_(st.sampled_from([0.0, 0.3, -0.4])),
        "logit_bias": draw_(st.none() | st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 2.5]), max_size=4)),
        "bad_words": tuple(draw_(st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3))),
        "stop_token_ids": tuple(draw_(st.lists(TOKENS, max_size=2))),
        "min_tokens": draw_(st.sampled_from([0, 0, 2, 4])),
        "ignore_eos": draw_(st.booleans()),
        "seed": draw_(st.integers(-(2**63), 2**63 - 1)),
        "logprobs": draw_(st.sampled_from([None, 0, 3])),
    }
    allowed = draw_(st.none() | st.lists(TOKENS, min_size=8, max_size=20, unique=True))
    return Row(
        random_logits(40, draw_(st.integers(0, 2**20)), dtype=draw_(st.sampled_from([torch.float32, torch.bfloat16]))),
        SamplingParams(**options, allowed_token_ids=None if allowed is None else tuple(allowed)),
        prompt=draw_(st.lists(TOKENS, min_size=1, max_size=6)),
        output=draw_(st.lists(TOKENS, max_size=6)),
        index=draw_(st.integers(0, 127)),
    )


# ------------------------------------------------------------------ the sampler
def sampler_for(rows: list[Row], slots: list[int], max_num_seqs: int = 64) -> Sampler:
    vocab_size = rows[0].logits.shape[0]
    state = RequestRows(max_num_seqs, 128, 16)
    sampler = Sampler(state, vocab_size, EOS)
    for row, slot in zip(rows, slots, strict=True):
        new = NewRow(
            slot=slot,
            request_id=row.request_id,
            token_ids=row.prompt + row.output,
            num_prompt_tokens=len(row.prompt),
            params=row.params,
            index=row.index,
            block_ids=[[]],
            num_computed=0,
        )
        state.admit(new, vocab_size)
        sampler.columns.admit(new)
    return sampler


def sample(rows, slots=None, masks=None):
    slots = list(range(len(rows))) if slots is None else slots
    sampler = sampler_for(rows, slots)
    return sampler.sample(torch.stack([row.logits for row in rows]), np.array(slots), masks)


def token_of(row: Row, mask=None) -> int:
    result = sample([row], masks=None if mask is None else {0: mask})
    assert not result.faults, result.faults
    return int(result.token_ids[0])


def outcome(result, place):
    return int(result.token_ids[place]), result.logprobs.get(place), result.faults.get(place)


def processed(row: Row) -> np.ndarray:
    """The row's logits after the processors, as the sampler has them."""
    sampler = sampler_for([row], [0])
    x = torch.full((1, padded(len(row.logits))), -INF)
    x[0, : len(row.logits)] = row.logits
    sampler._process(x, np.array([0]), {})
    return x[0, : len(row.logits)].numpy()


# ------------------------------------------------------------------ the reference
def reference_logits(row: Row) -> list[float]:
    """What the processors should make of a row: one token at a time, in float64."""
    p, n = row.params, row.logits.shape[0]
    x = [float(value) for value in row.logits.float()]
    for token in range(n):
        x[token] += (p.logit_bias or {}).get(token, 0.0)
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            x[token] = -INF
        for word in p.bad_words:
            prefix = list(word[:-1])
            if word[-1] == token and prefix == row.output[len(row.output) - len(prefix) :]:
                x[token] = -INF
        stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(EOS))
        if len(row.output) < p.min_tokens and token in stops:
            x[token] = -INF
        if token in row.prompt or token in row.output:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        count = row.output.count(token)
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return x


def reference_distribution(row: Row) -> list[float]:
    """Probabilities after temperature, top-k, top-p and min-p, most naively."""
    p, x = row.params, reference_logits(row)
    weights = [math.exp((value - max(x)) / p.temperature) for value in x]
    order = sorted(range(len(x)), key=lambda token: (-weights[token], token))
    kept = order[: p.top_k] if p.top_k > 0 else order
    if p.top_p < 1.0:
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token]
            if mass >= p.top_p * total:
                break
        kept = nucleus
    kept = [token for token in kept if weights[token] >= p.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(x))]
