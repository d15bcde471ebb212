"""The library flash-attn as its documentation describes it, in plain torch: it refuses what the library refuses, reads
what the library reads, and notes its calls."""

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

    def install(self, monkeypatch: pytest.MonkeyPatch, *releases: int) -> None:
        """Until the test ends, `flash_attn` and `flash_attn_interface` can be imported if their release is given."""
        varlen = {"flash_attn_varlen_func": self.varlen}
        for release, name, functions in (
            (2, "flash_attn", varlen | {"flash_attn_with_kvcache": self.with_kvcache_2}),
            (3, "flash_attn_interface", {"flash_attn_with_kvcache": self.with_kvcache_3}),
        ):
            module = ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__dict__.update(functions, __version__=f"{release}.8.3")
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
        assert causal and dropout_p == 0.0 and not return_attn_probs
        rows, lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert max(rows) <= max_seqlen_q and max(lengths) <= max_seqlen_k and max_seqlen_q > 1
        assert block_table is None or (k.shape[1] % 256 == 0 and len(block_table) == len(rows))
        out = torch.full(q.shape, torch.nan, dtype=q.dtype)
        for b, (start, length) in enumerate(zip(cu_seqlens_q.tolist()[:-1], lengths, strict=True)):
            some = slice(start, start + rows[b])
            if block_table is None:
                first = int(cu_seqlens_k[b])
                past = k[first : first + length], v[first : first + length]
            else:
                past = _gathered(k, v, block_table[b], length, rows[b], window_size, k.shape[1])
            out[some] = _attend(q[some], *past, softmax_scale, window_size, softcap)
        return out

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
        out = torch.full(q.shape, torch.nan, dtype=q.dtype)
        for b, length in enumerate(cache_seqlens.tolist()):
            past = _gathered(k_cache, v_cache, block_table[b], length, 1, window_size, k_cache.shape[1])
            out[b] = _attend(q[b], *past, softmax_scale, window_size, softcap)
        return out

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
        starts, rows = cu_seqlens_q.tolist(), cu_seqlens_q.diff().tolist()
        assert max(rows) <= max_seqlen_q and len(page_table) == len(cache_seqlens) == len(rows)
        out = torch.full(q.shape, torch.nan, dtype=q.dtype)
        for b, length in enumerate(cache_seqlens.tolist()):
            some = slice(starts[b], starts[b] + rows[b])
            if rows[b]:
                past = _gathered(k_cache, v_cache, page_table[b], length, rows[b], window_size, TILE)
                out[some] = _attend(q[some], *past, softmax_scale, window_size, softcap)
        return out


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
        assert each.dtype == torch.int32 and each.is_contiguous() and each[0] == 0


def _gathered(k, v, table, length, rows, window_size, tile):
    """K and V of a sequence [length, kv_heads, dim], those that no tile with a visible token holds zero."""
    size, left = k.shape[1], window_size[0]
    first = 0 if left < 0 else max(0, length - rows - left) // tile * tile
    index = table[first // size : -(-length // size)].long()
    assert ((index >= 0) & (index < len(k))).all(), "an address outside the pool"
    unread = first // size * size
    return [
        torch.cat([pages.new_zeros(unread, *pages.shape[2:]), pages[index].flatten(0, 1)])[:length] for pages in (k, v)
    ]


def _attend(q, k, v, scale, window_size, softcap):
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0), window_size
    window = None if left < 0 else left + 1
    out = plain_attention(q.float(), k.float(), v.float(), scale, window, softcap or None)
    return out.view(q.shape).to(q.dtype)


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
