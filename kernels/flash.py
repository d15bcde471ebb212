"""Paged attention by flash-attn (Dao 2023; Shah et al. 2024), where it is installed and people ask for it by name.

    flash-attn 3   all rows, over pages of any size
    flash-attn 2   all rows, over pages of a multiple of 256 tokens. Over others it cannot read: there it serves the
                   rows of sequences without earlier context, whose K and V are at hand beside the pages
                   (`ops.OwnRows`), and other rows get what serves where nobody is named

Nothing waits for the device, and steps can be captured: the longest context that is named is what the tables have room
for. Rows of sequences without tokens, as padded steps have them, get zeros.

It is never chosen by itself: a prompt's bits would depend on whether some of it was cached already, and on whether rows
were computed one at a time or many. num_splits is 1, so that the lengths of other sequences do not decide how a row's
sum is divided. It multiplies what it does not show a row by 0: where that is not finite, the row is not either.

Pages in `KVOrder.ROWS` are [kv_heads, block_size, head_dim] somewhere in a block. flash-attn takes [blocks, block_size,
kv_heads, head_dim] with any strides of whole 16 bytes but the last one's, so it is given a permuted view.
"""

import importlib
import importlib.util
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.functional import pad

from configs.kv import KVOrder, LayerKV
from kernels.ops import HostLengths, LayerPages, OwnRows
from kernels.reference.pages import pool_view
from kernels.registry import Accepted, Candidate, KVFormats, Refused, choose

BACKEND = "flash-attn"
FLASH_2, FLASH_3 = "flash-attn 2", "flash-attn 3"
PAGE = 256
"""Tokens: pages that flash-attn 2 reads hold a multiple of it."""
MAX_HEAD_DIM = 256
ASKS = (2, 8, 4)
"""From this release on flash-attn 2 checks the lengths of decoding sequences against the width of the table, and waits
for the device to know them (its pull request 2711)."""
VECTOR = 16
"""Bytes that are loaded at once: rows begin at multiples of it."""
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
ADVICE = "docs/gpu.md says how it is installed"

Views = tuple[torch.Tensor, torch.Tensor]
"""K and V, [blocks, block_size, kv_heads, head_dim]"""


# ------------------------------------------------------------------ the kernels
@dataclass(frozen=True)
class Flash3:
    """`paged_attention` by flash-attn 3."""

    with_kvcache: Callable[..., Any]
    """`flash_attn_interface.flash_attn_with_kvcache`"""
    _views: WeakKeyDictionary[LayerPages, Views] = field(default_factory=WeakKeyDictionary)

    def __call__(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        own: OwnRows | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "flash-attn has no sinks"
        if window is not None:  # its tiles reach across pages: tokens before the window are loaded too, and masked
            block_tables = block_tables.clamp(0, len(pages.pool) - 1)
        longest = len(q) if own is None else int(own.lengths.rows.max())
        k, v = known(self._views, pages)
        out: torch.Tensor = self.with_kvcache(
            aligned(q),
            k,
            v,
            cache_seqlens=seq_lens,
            page_table=block_tables,
            cu_seqlens_q=query_start,
            max_seqlen_q=max(2, longest),  # one row a sequence would be computed in other tiles than several
            num_splits=1,
            **options(scale, window, softcap),
        )
        return out.flatten(1)


@dataclass(frozen=True)
class Flash2:
    """`paged_attention` by flash-attn 2."""

    varlen: Callable[..., Any]
    """`flash_attn.flash_attn_varlen_func`"""
    with_kvcache: Callable[..., Any] | None
    """`flash_attn.flash_attn_with_kvcache`; None: it waits for the device (`ASKS`)."""
    _views: WeakKeyDictionary[LayerPages, Views] = field(default_factory=WeakKeyDictionary)
    _runs: WeakKeyDictionary[HostLengths, tuple["Run", ...]] = field(default_factory=WeakKeyDictionary)

    def __call__(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        own: OwnRows | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "flash-attn has no sinks"
        if pages.spec.block_size % PAGE == 0:
            lengths = None if own is None else own.lengths
            how = options(scale, window, softcap)
            return self._over_pages(q, pages, block_tables, query_start, seq_lens, lengths, how)
        others = choose("paged_attention", q.device.type, q.dtype, pages.kind.formats).function
        runs = () if own is None else self._runs_of(own.lengths)
        if own is None or not any(run.is_fresh for run in runs):
            out: torch.Tensor = others(q, pages, block_tables, query_start, seq_lens, scale, window, softcap)
            return out
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        for run in runs:
            rows, sequences, starts = run.rows, run.sequences, run.starts(query_start)
            if run.is_fresh:
                how = options(scale, window, softcap)
                out[rows] = self._fresh(q[rows], own.k[rows], own.v[rows], starts, run.longest, how)
            else:
                where = pages, block_tables[sequences], starts, seq_lens[sequences]
                out[rows] = others(q[rows], *where, scale, window, softcap)
        return out

    def _fresh(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: torch.Tensor,
        longest: int,
        how: dict[str, Any],
    ) -> torch.Tensor:
        """Rows of sequences that begin with them."""
        out: torch.Tensor = self.varlen(
            aligned(q),
            aligned(k),
            aligned(v),
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **how,
        )
        return out.flatten(1)

    def _over_pages(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        lengths: HostLengths | None,
        how: dict[str, Any],
    ) -> torch.Tensor:
        """Sequences of one row by `with_kvcache`: without a window it reads K and V once for all heads of a group."""
        q = aligned(q)
        k, v = known(self._views, pages)
        decodes, longest = (0, len(q)) if lengths is None else (lengths.num_decodes, int(lengths.rows.max()))
        parts = []
        if self.with_kvcache is None:
            decodes = 0
        elif decodes:
            out = self.with_kvcache(
                q[:decodes].unsqueeze(1),
                k,
                v,
                cache_seqlens=seq_lens[:decodes],
                block_table=block_tables[:decodes],
                num_splits=1,
                **how,
            )
            parts.append(out.flatten(1))
        if decodes < len(seq_lens):
            out = self.varlen(
                q[decodes:],
                k,
                v,
                cu_seqlens_q=query_start[decodes:] - decodes,
                cu_seqlens_k=pad(seq_lens[decodes:].cumsum(0, dtype=torch.int32), (1, 0)),
                max_seqlen_q=max(2, longest),  # with 1 it would divide sums as it sees fit
                max_seqlen_k=block_tables.shape[1] * pages.spec.block_size,
                block_table=block_tables[decodes:],
                **how,
            )
            parts.append(out.flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _runs_of(self, lengths: HostLengths) -> tuple["Run", ...]:
        runs = self._runs.get(lengths)
        if runs is None:
            runs = self._runs[lengths] = tuple(runs_of(lengths))
        return runs


class Run(NamedTuple):
    """Sequences one after another that are computed together."""

    sequences: slice
    rows: slice
    is_fresh: bool
    """Several rows each, and no earlier context."""
    longest: int
    """Rows of one of them."""

    def starts(self, query_start: torch.Tensor) -> torch.Tensor:
        """Where each begins, and the last one ends, in the rows of this run."""
        found: torch.Tensor = query_start[self.sequences.start : self.sequences.stop + 1] - self.rows.start
        return found


def runs_of(lengths: HostLengths) -> Iterator[Run]:
    fresh = (lengths.rows == lengths.contexts) & (lengths.rows > 1)
    ends = lengths.rows.cumsum()
    bounds = [0, *(np.flatnonzero(fresh[1:] != fresh[:-1]) + 1).tolist(), len(fresh)]
    row = 0
    for first, last in itertools.pairwise(bounds):
        end = int(ends[last - 1])
        yield Run(slice(first, last), slice(row, end), bool(fresh[first]), int(lengths.rows[first:last].max()))
        row = end


def options(scale: float, window: int | None, softcap: float | None) -> dict[str, Any]:
    """In flash-attn's words: a window is how many tokens before its own, and after it, a row sees."""
    return {
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": softcap or 0.0,
    }


def known(views: WeakKeyDictionary[LayerPages, Views], pages: LayerPages) -> Views:
    """Made once for each layer."""
    found = views.get(pages)
    if found is None:
        assert pages.spec.order is KVOrder.ROWS, pages.spec.order
        k, v = (pool_view(pages.pool, half.codes).transpose(1, 2) for half in pages.halves)
        found = views[pages] = k, v
    return found


def aligned(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] whose rows begin where flash-attn can load them: x itself, or a copy."""
    whole = x.stride(0) * x.itemsize % VECTOR == 0 and x.data_ptr() % VECTOR == 0
    return x if whole else x.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------ what it can do, and where
def refuses_formats(dtype: torch.dtype, formats: KVFormats) -> str | None:
    other = next((format for format in formats if getattr(torch, format.dtype) is not dtype), None)
    return None if other is None else f"reads pages in {DTYPES[dtype]}, not in {other.value}"


def refuses_layer(kind: LayerKV, has_sinks: bool) -> str | None:
    """Why flash-attn cannot serve such a layer, or None. Windows and soft caps it has."""
    if has_sinks:
        return "has no attention sinks"
    if kind.head_dim % 8 or kind.head_dim > MAX_HEAD_DIM:
        return f"takes heads of a multiple of 8 dims up to {MAX_HEAD_DIM}, not of {kind.head_dim}"
    return None


def offer_3(device: str, dtype: torch.dtype) -> Accepted | Refused:
    if reason := _refuses_device(dtype):
        return Refused(reason)
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return Refused(f"is for compute capability 9.0 (Hopper), not {major}.{minor}")
    module = _imported("flash_attn_interface")
    if isinstance(module, Refused):
        return module
    needed = "page_table", "cu_seqlens_q", "max_seqlen_q", "window_size", "softcap", "num_splits"
    with_kvcache = _function(module, "flash_attn_with_kvcache", needed)
    return with_kvcache if isinstance(with_kvcache, Refused) else Accepted(Flash3(with_kvcache))


def offer_2(device: str, dtype: torch.dtype) -> Accepted | Refused:
    if reason := _refuses_device(dtype):
        return Refused(reason)
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return Refused(f"needs compute capability 8.0 (Ampere), and this is {major}.{minor}")
    module = _imported("flash_attn")
    if isinstance(module, Refused):
        return module
    varlen = _function(module, "flash_attn_varlen_func", ("window_size", "softcap", "block_table"))
    needed = "window_size", "softcap", "block_table", "num_splits"
    with_kvcache = _function(module, "flash_attn_with_kvcache", needed)
    if isinstance(varlen, Refused):
        return varlen
    if isinstance(with_kvcache, Refused):
        return with_kvcache
    release = tuple(int(number) for number in re.findall(r"\d+", getattr(module, "__version__", ""))[:3])
    return Accepted(Flash2(varlen, None if release >= ASKS else with_kvcache))


def _refuses_device(dtype: torch.dtype) -> str | None:
    if torch.version.hip:
        return "runs on an NVIDIA GPU, not on ROCm"
    if dtype not in DTYPES:
        return f"computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    return None


def _imported(name: str) -> ModuleType | Refused:
    """A build for another torch is found, and fails when it is loaded."""
    if importlib.util.find_spec(name) is None:
        return Refused(f"{name} is not installed ({ADVICE})")
    try:
        return importlib.import_module(name)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Refused(f"{name} is installed and cannot be loaded: {first} ({ADVICE})")


def _function(module: ModuleType, name: str, needed: tuple[str, ...]) -> Callable[..., Any] | Refused:
    """A function of the library that has these parameters: they came one after another."""
    function = getattr(module, name, None)
    version = getattr(module, "__version__", "without a version")
    if function is None:
        return Refused(f"{module.__name__} {version} has no {name} ({ADVICE})")
    lacking = [parameter for parameter in needed if parameter not in inspect.signature(function).parameters]
    if lacking:
        return Refused(f"{module.__name__} {version} is too old: {name} has no {', '.join(lacking)} ({ADVICE})")
    found: Callable[..., Any] = function
    return found


CANDIDATES = (
    Candidate("paged_attention", FLASH_3, offer_3, refuses_formats, BACKEND, on_request=True, device="cuda"),
    Candidate("paged_attention", FLASH_2, offer_2, refuses_formats, BACKEND, on_request=True, device="cuda"),
)
