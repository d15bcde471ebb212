"""What changes logits before temperature, in order: bias, whitelist, bad words, stop tokens held back, grammar masks,
penalties.

Each step takes the fp32 logits x [R, width] of a few rows, in place, and the rows that may want it. Steps over lists of
token ids are flattened into one gather and one scatter; every number depends on its own row only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.runner.sampling.parameters import Extras, Ids

F32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class Constrained:
    """A row of x that wants more than temperature."""

    place: int
    extras: Extras
    output: npt.NDArray[np.int32]
    """Tokens generated so far."""
    length: int
    """Tokens so far, prompt included."""


def process(x: F32, rows: list[Constrained], masks: list[tuple[int, Sequence[int]]], vocab_size: int) -> None:
    """Runs all steps. masks: (place, int32 words of allowed-token bits). Numbers may become -inf, or inf and NaN."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        add_bias(x, rows)
        keep_allowed(x, rows)
        ban_words(x, rows)
        hold_stops(x, rows)
        apply_masks(x, masks, vocab_size)
        penalise(x, rows)


def add_bias(x: F32, rows: list[Constrained]) -> None:
    """logit_bias: adds each value to its token's logit."""
    biased = [row for row in rows if len(row.extras.bias_ids)]
    if biased:
        at = _flat([(row.place, row.extras.bias_ids) for row in biased])
        x[at] += np.concatenate([row.extras.bias_values for row in biased])


def keep_allowed(x: F32, rows: list[Constrained]) -> None:
    """allowed_token_ids: everything else goes to -inf."""
    for row in rows:
        allowed = row.extras.allowed_ids
        if allowed is not None:
            kept = x[row.place, allowed]
            x[row.place] = -np.inf
            x[row.place, allowed] = kept


def ban_words(x: F32, rows: list[Constrained]) -> None:
    """bad_words: the last token of a sequence whose other tokens end the output so far goes to -inf."""
    _forbid(x, [(row.place, row.extras.banned_ids) for row in rows])
    for row in rows:
        if row.extras.bad_sequences:
            longest = max(len(word) for word in row.extras.bad_sequences)
            tail = tuple(row.output[-longest:].tolist())
            for word in row.extras.bad_sequences:
                if tail[1 - len(word) :] == word[:-1]:
                    x[row.place, word[-1]] = -np.inf


def hold_stops(x: F32, rows: list[Constrained]) -> None:
    """min_tokens: end-of-sequence and stop tokens go to -inf while the output is too short."""
    _forbid(x, [(row.place, row.extras.stop_ids) for row in rows if row.length < row.extras.min_length])


def apply_masks(x: F32, masks: list[tuple[int, Sequence[int]]], vocab_size: int) -> None:
    """Tokens whose bit is 0, or that lie beyond the mask, go to -inf. Bit t of the mask: word t / 32, bit t % 32."""
    for place, mask in masks:
        words = np.asarray(mask).astype(np.int64).astype("<u4")
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
        row = x[place, :vocab_size]
        row[: len(allowed)][allowed == 0] = -np.inf
        row[len(allowed) :] = -np.inf


def penalise(x: F32, rows: list[Constrained]) -> None:
    """Repetition penalty over prompt and output (Keskar et al. 2019), then frequency and presence over the output.

    The definitions are those of transformers (repetition) and of OpenAI's API (frequency, presence).
    """
    counted = [(row.place, row.extras, row.extras.counts) for row in rows if row.extras.counts is not None]
    if not counted:
        return
    sizes = [counts.size for _, _, counts in counted]
    at = _flat([(place, counts.ids) for place, _, counts in counted])
    counts = np.concatenate([counts.counts for _, _, counts in counted]).astype(np.float32)
    repetition = np.array([extras.repetition for _, extras, _ in counted], np.float32).repeat(sizes)
    frequency = np.array([extras.frequency for _, extras, _ in counted], np.float32).repeat(sizes)
    presence = np.array([extras.presence for _, extras, _ in counted], np.float32).repeat(sizes)
    values = x[at]
    values = np.where(values > 0, values / repetition, values * repetition)
    x[at] = values - frequency * counts - presence * (counts > 0)


def _forbid(x: F32, parts: list[tuple[int, Ids]]) -> None:
    wanted = [part for part in parts if len(part[1])]
    if wanted:
        x[_flat(wanted)] = -np.inf


def _flat(parts: list[tuple[int, Ids]]) -> tuple[Ids, Ids]:
    """(row, token) of every id in `parts`."""
    places = np.array([place for place, _ in parts], np.int64).repeat([len(ids) for _, ids in parts])
    return places, np.concatenate([ids for _, ids in parts])
