"""The library flash-attn as its documentation describes it, in plain torch: it refuses what the library refuses, reads
what the library reads, and notes its calls.

As in the library, a function looks at shapes and types, and numbers of tensors are read by what it launches: one
operation, which a capture has whole, with the arguments that Python computed for it.
"""

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from paged import plain_attention

from kernels.registry import choose

TILE = 128
"""Tokens that flash-attn 3 loads at once, whatever the pages."""


@dataclass
class FlashLibrary:
    """Both releases. `calls`: (function, its arguments) in order."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asks: bool = False
    """flash-attn 2 is 2.8.4, whose `flash_attn_with_kvcache` asks the device how long sequences are."""

    def install(self, monkeypatch: pytest.MonkeyPatch, *releases: int) -> None:
        """Until the test ends, `flash_attn` and `flash_attn_interface` can be imported if their release is given."""
        varlen = {"flash_attn_varlen_func": self.varlen}
        for release, name, functions in (
            (2, "flash_attn", varlen | {"flash_attn_with_kvcache": self.with_kvcache_2}),
            (3, "flash_attn_interface", {"flash_attn_with_kvcache": self.with_kvcache_3}),
        ):
            module = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__dict__.update(functions, __version__=f"{release}.8.{4 if self.asks else 3}")
            monkeypatch.setitem(sys.modules, name, module if release in releases else None)

    def varlen(
        self,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        self.calls.append(("varlen", dict(locals())))
        _check_numbers(q, k, v, block_table)
        _check_starts(cu_seqlens_q, cu_seqlens_k)
        assert causal and dropout_p == 0.0 and not return_attn_probs and max_seqlen_q > 1
        assert block_table is None or (k.shape[1] % 256 == 0 and len(block_table) == len(cu_seqlens_q) - 1)
        lengths = cu_seqlens_k.diff()
        most = max_seqlen_q, max_seqlen_k
        return _launched(q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, window_size, softcap, *most)

    def with_kvcache_2(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        self.calls.append(("with_kvcache", dict(locals())))
        _check_numbers(q, k_cache, v_cache, block_table)
        assert q.dim() == 4 and q.shape[1] == 1 and k is None and v is None and num_splits == 1 and causal
        assert k_cache.shape[1] % 256 == 0 and len(block_table) == len(cache_seqlens) == len(q)
        assert cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
        most = 1, block_table.shape[1] * k_cache.shape[1]
        assert not self.asks or cache_seqlens.max().item() <= most[1]
        rows, starts = q.squeeze(1), torch.arange(len(q) + 1, dtype=torch.int32)
        how = softmax_scale, window_size, softcap
        return _launched(rows, k_cache, v_cache, starts, cache_seqlens, block_table, *how, *most).unsqueeze(1)

    def with_kvcache_3(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        self.calls.append(("with_kvcache", dict(locals())))
        _check_numbers(q, k_cache, v_cache, page_table)
        _check_starts(cu_seqlens_q)
        assert q.dim() == 3 and k is None and v is None and num_splits == 1 and causal and max_seqlen_q > 1
        assert cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
        assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
        most = max_seqlen_q, page_table.shape[1] * k_cache.shape[1]
        how = softmax_scale, window_size, softcap
        return _launched(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, *how, *most, TILE)


def _check_numbers(q, k, v, table):
    for x in (q, k, v):
        assert x.dtype == q.dtype and x.dtype in (torch.bfloat16, torch.float16)
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
        assert all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.shape[-2] % k.shape[-2] == 0
    assert k.dim() == (3 if table is None else 4)
    assert table is None or (table.dtype == torch.int32 and table.stride(-1) == 1)


def _check_starts(*starts):
    for each in starts:
        assert each.dtype == torch.int32 and each.is_contiguous()


def _launched(q, k, v, starts, lengths, table, scale, window_size, softcap, max_rows, max_tokens, tile=None):
    """tile: tokens that are loaded at once; None: a page."""
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0), window_size
    tile = tile or k.shape[1]
    return _attend(q, k, v, starts, lengths, table, scale, left, softcap, max_rows, max_tokens, tile)


@torch.library.custom_op("flash_library::attend", mutates_args=())
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    scale: float,
    left: int,
    softcap: float,
    max_rows: int,
    max_tokens: int,
    tile: int,
) -> torch.Tensor:
    """Rows [starts[b], starts[b + 1]) of q see `lengths[b]` tokens; those that see none get 0, those of nobody NaN."""
    rows, firsts = starts.diff().tolist(), [0, *lengths.cumsum(0).tolist()]
    assert starts[0] == 0 and max(rows) <= max_rows and max(lengths) <= max_tokens
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    for b, (start, length) in enumerate(zip(starts.tolist()[:-1], lengths.tolist(), strict=True)):
        end = start + rows[b]
        seeing = min(rows[b], length)
        out[start : end - seeing] = 0.0
        if seeing == 0:
            continue
        if table is None:
            past = k[firsts[b] : firsts[b] + length], v[firsts[b] : firsts[b] + length]
        else:
            past = _gathered(k, v, table[b], length, seeing, left, tile)
        exact = (x.double() for x in (q[end - seeing : end], *past))
        found = plain_attention(*exact, scale, None if left < 0 else left + 1, softcap or None)
        out[end - seeing : end] = found.view(seeing, *q.shape[1:])
    return out


def _gathered(k, v, table, length, rows, left, tile):
    """K and V of a sequence [length, kv_heads, dim], those that no tile with a visible token holds zero."""
    size = k.shape[1]
    first = 0 if left < 0 else max(0, length - rows - left) // tile * tile
    index = table[first // size : -(-length // size)].long()
    assert ((index >= 0) & (index < len(k))).all(), "an address outside the pool"
    unread = first // size * size
    return [
        torch.cat([pages.new_zeros(unread, *pages.shape[2:]), pages[index].flatten(0, 1)])[:length] for pages in (k, v)
    ]


@contextmanager
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashLibrary]:
    """Neither release is installed, on a GPU of compute capability 9.0, until a test says so."""
    library = FlashLibrary()
    library.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    choose.cache_clear()
    try:
        yield library
    finally:
        choose.cache_clear()
