"""Paged attention in plain torch. Contract: `kernels.ops`."""

import functools

import torch

from kernels.ops import LayerPages, compute_dtype
from kernels.reference import kv_formats
from kernels.reference.pages import Past, gather_kv

SPLIT = 256
"""Tokens whose values one matrix product sums. Over longer ones libraries divide the sum by the number of threads."""

SCORES = 2**24
"""Numbers q . k worked on at a time where rows go together: 64 MiB in fp32, and a few times that for what is made of
them. `configs.pool` reckons with it."""


def paged_attention(
    q: torch.Tensor,
    pages: LayerPages,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sequence by sequence. On the CPU also row by row, so that a row's result cannot depend on what else is computed;
    elsewhere nobody claims that, and a launch for each row would take longer than all the arithmetic."""
    dtype, numbers = compute_dtype(q.dtype, pages.kind.formats), _as_keys(q, pages)
    out = torch.empty_like(numbers)
    attend = attend_alone if q.is_cpu else attend_together
    ends = torch.cat((query_start, seq_lens)).tolist()  # one transfer
    starts, lengths = ends[: len(query_start)], ends[len(query_start) :]
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        if first == last:
            continue
        hidden = 0 if window is None else max(0, length - (last - 1 - first) - window)  # tokens that no row sees
        k, v = gather_kv(pages, block_tables[b], hidden, length, dtype)
        attend(numbers[first:last], k, v, scale, window, softcap, sinks, out[first:last])
    return _from_values(out, pages).to(q.dtype).flatten(1)


def _as_keys(q: torch.Tensor, pages: LayerPages) -> torch.Tensor:
    """q [T, Hq, D] as K is stored: times K's channels, which then need not be multiplied into each K, and rotated.
    fp32, rounded to the dtype that attention computes in."""
    kind, dtype = pages.kind, compute_dtype(q.dtype, pages.kind.formats)
    q = q.float()
    if pages.k_transform.channels is not None:
        q = _times(q, pages.k_transform.channels)
    if kind.is_rotated(kind.formats[0]):
        q = kv_formats.rotate(q)
    return q.to(dtype).float().contiguous()


def _from_values(out: torch.Tensor, pages: LayerPages) -> torch.Tensor:
    """Sums [T, Hq, D] of V as it is stored -> of V."""
    if pages.kind.is_rotated(pages.kind.formats[1]):
        out = kv_formats.unrotate(out)
    return out if pages.v_transform.channels is None else _times(out, pages.v_transform.channels)


def _times(x: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """x: [T, Hq, D]; channels: [Hkv, D]."""
    return x * channels.repeat_interleave(x.shape[1] // channels.shape[0], 0)


def attend_alone(
    q: torch.Tensor,
    k: Past,
    v: Past,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Rows q [n, Hq, D], the last n of the tokens of k and v, each by itself, into out [n, Hq, D]."""
    rows, (kv_heads, tokens, dims) = q.shape[0], k.numbers.shape
    for row in range(rows):
        end = tokens - rows + row + 1
        start = 0 if window is None else max(0, end - window)
        k_seen, v_seen = k.slice(start, end), v.slice(start, end)
        scores = k_seen.scaled(q[row].float().view(kv_heads, -1, dims) @ k_seen.numbers.mT) * scale  # [Hkv, G, L]
        weights = v_seen.scaled(softmax(cap(scores, softcap), sinks))
        parts = zip(torch.split(weights, SPLIT, -1), torch.split(v_seen.numbers, SPLIT, -2), strict=True)
        products = [w @ x for w, x in parts]
        out[row] = functools.reduce(torch.add, products).flatten(0, 1)


def attend_together(
    q: torch.Tensor,
    k: Past,
    v: Past,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The same with as many rows in a product as `SCORES` allows, and a mask for what each of them does not see. Where
    a row sees V that is not finite, all that it gets of that head is NaN."""
    (rows, heads, dims), (kv_heads, tokens, _) = q.shape, k.numbers.shape
    finite = v.numbers.isfinite()
    numbers, broken = v.numbers.where(finite, 0.0), ~finite.all(-1)  # 0 x NaN would reach rows that do not see it
    token = torch.arange(tokens, device=q.device)
    step = max(1, SCORES // (heads * tokens))
    for first in range(0, rows, step):
        some = q[first : first + step]
        n = some.shape[0]
        end = torch.arange(tokens - rows + first + 1, tokens - rows + first + 1 + n, device=q.device)[:, None]
        unseen = token >= end  # [n, L]
        if window is not None:
            unseen |= token < end - window
        grouped = some.float().view(n, kv_heads, -1, dims).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        scores = k.scaled((grouped.flatten(1, 2) @ k.numbers.mT).mul_(scale))
        scores = cap(scores, softcap).view(kv_heads, -1, n, tokens)
        weights = v.scaled(softmax(scores.masked_fill_(unseen, -torch.inf), sinks))
        if v.scales is not None:
            weights = weights.masked_fill(unseen, 0.0)  # whatever the scales of those tokens are
        products = (weights.flatten(1, 2) @ numbers).view(kv_heads, -1, n, dims).permute(2, 0, 1, 3)
        sees_broken = (~unseen).float() @ broken.T.float() > 0  # [n, Hkv]
        out[first : first + step] = products.masked_fill(sees_broken[..., None, None], torch.nan).flatten(1, 2)


def cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """In place."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of scores [Hkv, G, ..., L]; sinks [Hq], one for each head, take their share."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    one_each = sinks.view(*scores.shape[:2], *[1] * (scores.dim() - 2)).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, one_each), dim=-1), dim=-1)[..., :-1]
