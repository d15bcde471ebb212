"""One public function per op. Each states and asserts its shape contract; `kernels.registry` picks who computes it.

T tokens of a step, B sequences, Hq query heads, Hkv key/value heads, D head_dim, H hidden size. The result for a row
depends on that row only (in attention: on its own sequence up to it), bit for bit: never on T, B, the row's place or
the number of threads. (On a GPU linear layers keep that where they were packed to (`registry.INVARIANT`), everything
where Triton serves.) Broken contracts are bugs of the caller and end in AssertionError.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch

from configs.kv import PAGE, KVFormat, KVHalf, KVSpec, LayerKV
from kernels.grouped_weight import GroupedWeight
from kernels.int8_weight import Int8Weight
from kernels.registry import AUTO, KVFormats, choose

Gate = Literal["silu", "gelu_tanh"]
"""What is done to the numbers that gate others: SwiGLU, GeGLU (Shazeer 2020); tanh: the approximation of GELU by it."""

GATES: tuple[Gate, ...] = get_args(Gate)

LANES = 64
"""Numbers of a row over the vocabulary that `softmax_weights` sums into one; a power of two. Rows are padded to it."""

LARGEST_VOCABULARY = 2**19
"""Entries of a row that `draw` takes: so many weights of `reference.sampling` sum to 2^62."""

GATED_IS_NOT_WIDE = "sums of a gated weight are no outputs"
"""What each `PackedLinear` says to that (`linear`)."""

CodedWeight = Int8Weight | GroupedWeight
"""Weights in codes."""


@dataclass(frozen=True, eq=False)
class KVTransform:
    """What is done to K, or V, of a layer before it becomes codes: fp32, contiguous, on the pool's device. Formulas and
    reasons: `kernels.reference.kv_formats`."""

    channels: torch.Tensor | None = None
    """[kv_heads, head_dim]: by what it is divided. With static scales these are the scales."""
    centre: torch.Tensor | None = None
    """[kv_heads, head_dim]: what is subtracted first. Of K only, and only where nothing bends the scores: it adds the
    same to all scores of a row, which softmax does not see, but a soft cap and sinks do."""
    feedback: torch.Tensor | None = None
    """[kv_heads, head_dim, head_dim], of which entries [h, i, j > i] count: how much of dim i's rounding error is
    subtracted from dim j before that is rounded. Of K only."""


NO_TRANSFORM = KVTransform()


@dataclass(frozen=True, eq=False)
class LayerPages:
    """One layer's part of a KV pool. Kept as long as the pool: what a kernel needs to know of it is made once."""

    pool: torch.Tensor
    """uint8 [blocks, block_bytes], contiguous."""
    spec: KVSpec
    """Layout of a block."""
    layer: int
    """Index among the layers of `spec`."""
    k_transform: KVTransform = NO_TRANSFORM
    """Static scales where the layer has them; else of formats with scales of their own, and of no others."""
    v_transform: KVTransform = NO_TRANSFORM
    """Static scales where the layer has them, and nothing else."""

    def __post_init__(self) -> None:
        _assert_pool(self.pool)
        assert self.pool.shape[1] == self.spec.block_bytes, (self.pool.shape, self.spec.block_bytes)
        assert 0 <= self.layer < len(self.spec.layers), (self.layer, len(self.spec.layers))
        for half, transform in zip("KV", self.transforms, strict=True):
            self._check(half, transform)

    def _check(self, half: str, transform: KVTransform) -> None:
        kind, format = self.kind, self.kind.formats[half == "V"]
        may_be_fitted = half == "K" and kind.num_scales(format) > 0
        given = transform.channels, transform.centre, transform.feedback
        is_static = kind.static and format.may_be_static
        assert is_static == (transform.channels is not None) or may_be_fitted, (kind, half)
        assert (transform.centre is None and transform.feedback is None) or may_be_fitted, (kind, half)
        per_dim = kind.kv_heads, kind.head_dim
        for x, shape in zip(given, (per_dim, per_dim, (*per_dim, kind.head_dim)), strict=True):
            if x is not None:
                assert x.shape == shape and x.dtype == torch.float32 and x.is_contiguous(), (x.shape, x.dtype, kind)
                assert x.device == self.pool.device, x.device

    @property
    def kind(self) -> LayerKV:
        return self.spec.layers[self.layer]

    @property
    def halves(self) -> tuple[KVHalf, KVHalf]:
        """(K, V)"""
        return self.spec.halves[self.layer]

    @property
    def transforms(self) -> tuple[KVTransform, KVTransform]:
        """(of K, of V)"""
        return self.k_transform, self.v_transform


@dataclass(frozen=True, eq=False)
class HostLengths:
    """What the host knows of a step's sequences: nobody then needs to ask the device, and to wait for it."""

    rows: npt.NDArray[np.int64]
    """[B]: rows of each sequence in this step"""
    contexts: npt.NDArray[np.int64]
    """[B]: context length of each, these rows included; in a step that is captured the most it will ever be"""

    @functools.cached_property
    def num_decodes(self) -> int:
        """Sequences of one row each that come before all others."""
        several = np.flatnonzero(self.rows != 1)
        return int(several[0]) if len(several) else len(self.rows)


@dataclass(frozen=True, eq=False)
class OwnRows:
    """K and V of the very rows that attend, [T, Hkv, D] as `store_kv` was given them, any row stride, heads and dims
    dense; and how the rows belong to sequences."""

    k: torch.Tensor
    v: torch.Tensor
    lengths: HostLengths

    def __post_init__(self) -> None:
        assert self.k.dim() == 3 and self.k.shape == self.v.shape, (self.k.shape, self.v.shape)
        assert self.k.dtype == self.v.dtype and _rows_dense(self.k) and _rows_dense(self.v), self.k.dtype


class PackedLinear(Protocol):
    """A weight laid out for the implementation that will multiply by it. Made by `pack_linear`."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features], in the dtype that it was packed for, or in fp32 (`linear`)."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [T, H], or [T, heads, H] with heads and dims dense; any row stride; weight: [H] -> dense, x's shape.

    Root mean square layer norm (Zhang and Sennrich 2019), of each head where there are heads: fp32 inside. The weight
    has x's dtype: then the norm is rounded to it before the weight is multiplied, as transformers does in Llama. Or
    it is fp32: then it is multiplied in fp32 and the product rounded, as transformers does in Gemma.
    """
    assert x.dim() == 2 or (x.dim() == 3 and _rows_dense(x)), (x.shape, x.stride())
    assert weight.shape == x.shape[-1:] and weight.dtype in (x.dtype, torch.float32), (x.shape, weight.shape, x.dtype)
    assert _dense(x) and _dense(weight), (x.stride(), weight.stride())
    normed: torch.Tensor = _serve("rms_norm", x)(x, weight, eps)
    return normed


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, residual: [T, H], one dtype, any row stride; weight: [H] as in `rms_norm` -> [T, H].

    Adds x to `residual` IN PLACE (rounded to the dtype) and returns the `rms_norm` of the sum.
    """
    assert x.dim() == 2 and residual.shape == x.shape and weight.shape == x.shape[1:], (x.shape, residual.shape)
    assert x.dtype == residual.dtype and weight.dtype in (x.dtype, torch.float32), (x.dtype, weight.dtype)
    assert _dense(x) and _dense(residual) and _dense(weight), (x.stride(), residual.stride(), weight.stride())
    normed: torch.Tensor = _serve("add_rms_norm", x)(x, residual, weight, eps)
    return normed


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates q [T, Hq, D] and k [T, Hkv, D] IN PLACE by the angles of `positions` (int64 [T]).

    cos, sin: fp32 [P, R / 2], one row a position; the first R <= D dims of a head turn, the others stay. Pairs are
    (i, i + R / 2) ("neox"); fp32 arithmetic, rounded once. q and k may be views of one buffer: any row stride, heads
    and dims dense. (RoPE: Su et al. 2021.)
    """
    _check_rotary(q, k, positions, cos, sin)
    _serve("rotary", q)(q, k, positions, cos, sin)


def norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """`rms_norm` of each head of q, by q_weight [D], and of k, by k_weight [D], then `rotary`: all IN PLACE."""
    _check_rotary(q, k, positions, cos, sin)
    assert q_weight.shape == k_weight.shape == q.shape[2:], (q_weight.shape, k_weight.shape, q.shape)
    assert q_weight.dtype == k_weight.dtype and q_weight.dtype in (q.dtype, torch.float32), (q_weight.dtype, q.dtype)
    assert _dense(q_weight) and _dense(k_weight), (q_weight.stride(), k_weight.stride())
    _serve("norm_rotary", q)(q, k, q_weight, k_weight, eps, positions, cos, sin)


def gate_mul(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """x: [T, 2 I], any row stride -> [T, I]: gate(x[:, :I]) * x[:, I:].

    The gate in fp32, rounded to x's dtype before the product, as transformers does.
    """
    assert x.dim() == 2 and x.shape[1] % 2 == 0 and _dense(x) and gate in GATES, (x.shape, x.stride(), gate)
    gated: torch.Tensor = _serve("gate_mul", x)(x, gate)
    return gated


def gather_rows(table: torch.Tensor, indices: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """table: [N, H], any row stride; indices: int64 [T], each in [0, N) -> [T, H]: those rows, times `scale`.

    `scale` is a number of the table's dtype; the product is rounded to it.
    """
    assert table.dim() == 2 and _dense(table), (table.shape, table.stride())
    assert indices.dim() == 1 and indices.dtype == torch.int64 and indices.is_contiguous(), indices
    rows: torch.Tensor = _serve("gather_rows", table)(table, indices, scale)
    return rows


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate | None = None, backend: str = AUTO
) -> PackedLinear:
    """weight: [N, K], bias: [N] or None, one dtype. Lays the weight out once, at load.

    gate: weight is [2 N, K], the gates first; the layer is `gate_mul` of its N gates and N others, in the same bits.
    backend: who computes it (`kernels.registry`), one that serves here.
    """
    assert weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1]), weight.shape
    assert bias is None or bias.dtype == weight.dtype, bias.dtype
    assert gate is None or (gate in GATES and weight.shape[0] % 2 == 0), (gate, weight.shape)
    packed: PackedLinear = _serve("pack_linear", weight, None, backend)(weight, bias, gate)
    return packed


def pack_coded_linear(
    weight: CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, gate: Gate | None = None
) -> PackedLinear:
    """`pack_linear` of a weight in codes, for x of `dtype`, which `bias` has too.

    In int8, products of x and codes are summed in fp32 as those of any weight; each sum is multiplied by its output's
    scale, and the bias added, in fp32 too, before it is rounded. In groups, the layer is that of `weight.widened()`,
    rounded to `dtype`: in the same bits where our own kernels compute.
    """
    outputs = len(weight.codes)
    assert bias is None or (bias.shape == (outputs,) and bias.dtype == dtype), (bias.shape, bias.dtype)
    assert gate is None or (gate in GATES and outputs % 2 == 0), (gate, outputs)
    device = "cpu" if weight.codes.is_cpu else weight.codes.device.type
    packed: PackedLinear = choose("pack_coded_linear", device, dtype).function(weight, dtype, bias, gate)
    return packed


def linear(x: torch.Tensor, packed: PackedLinear, wide: bool = False) -> torch.Tensor:
    """x: [T, K], any row stride -> x @ weight.T + bias: [T, N], gated if the weight is. x has the dtype that the weight
    was packed for.

    wide: the result is fp32, as it was summed; of no gated weight. (oneDNN and torch's products round it first.)
    """
    assert x.dim() == 2 and x.shape[1] == packed.in_features and _dense(x), (x.shape, x.stride(), packed.in_features)
    return packed(x, wide)


def store_kv(k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
    """Writes k, v [T, Hkv, D], of one dtype, into a layer's pages, in the layer's formats (`reference.kv_formats`).

    slot_mapping: int64 [T], block x block_size + offset; -1 is skipped; no slot occurs twice. Any row stride, heads and
    dims dense.
    """
    kind = pages.kind
    assert k.dim() == 3 and k.shape == v.shape and k.shape[1:] == (kind.kv_heads, kind.head_dim), (k.shape, kind)
    assert k.dtype == v.dtype and k.is_floating_point() and slot_mapping.dtype == torch.int64, (k.dtype, v.dtype)
    assert slot_mapping.shape == k.shape[:1] and slot_mapping.is_contiguous(), slot_mapping.shape
    assert _rows_dense(k) and _rows_dense(v), (k.stride(), v.stride())
    _serve("store_kv", k, kind.formats)(k, v, pages, slot_mapping)


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
    backend: str = AUTO,
    own: OwnRows | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, Hq, D] over the pages of each row's sequence -> [T, Hq * D], q's dtype.

    K and V are read as they are stored (`reference.kv_formats`) and multiplied in `compute_dtype`.

    block_tables: int32 [B, max_blocks]; query_start: int32 [B + 1], rows [query_start[b], query_start[b + 1]) are the
    last ones of sequence b; seq_lens: int32 [B], context length including these rows. Row i of n sees the first seq_len
    - n + i + 1 tokens, with a window the last `window` of those; other slots contribute nothing, whatever codes and
    scales they hold, and entries of block_tables for blocks of which no row sees anything are never read. q: any row
    stride, heads and dims dense. Hq is a multiple of Hkv; query heads [h * Hq / Hkv, (h + 1) * Hq / Hkv) read key/value
    head h. A score is q . k x scale, scale > 0; with softcap > 0 it is softcap x tanh(q . k x scale / softcap), as in
    Gemma 2. sinks: fp32 [Hq], contiguous, for each query head the logit of no token: it takes its share of the softmax
    and adds nothing (Xiao et al. 2023; learned in gpt-oss).

    backend: who computes it (`kernels.registry`), one that serves here. own: may be read in place of the rows' pages,
    where those hold K and V as they are; for backends that read it (`kernels.flash`), and for no others.
    """
    kind = pages.kind
    assert q.dim() == 3 and q.shape[2] == kind.head_dim and q.shape[1] % kind.kv_heads == 0, (q.shape, kind)
    assert q.is_floating_point() and _rows_dense(q), (q.dtype, q.stride())
    assert block_tables.dim() == 2 and block_tables.dtype == query_start.dtype == seq_lens.dtype == torch.int32
    assert query_start.shape[0] == seq_lens.shape[0] + 1 == block_tables.shape[0] + 1, (query_start, seq_lens)
    assert block_tables.stride(1) == 1 and query_start.is_contiguous() and seq_lens.is_contiguous() and scale > 0
    assert window is None or window > 0, window
    assert softcap is None or softcap > 0, softcap
    assert sinks is None or (sinks.shape == q.shape[1:2] and sinks.dtype == torch.float32), (sinks.shape, sinks.dtype)
    assert sinks is None or (sinks.is_contiguous() and sinks.device == q.device), (sinks.stride(), sinks.device)
    serve = _serve("paged_attention", q, kind.formats, backend)
    how = (scale, window, softcap, sinks) if own is None else (scale, window, softcap, sinks, own)
    out: torch.Tensor = serve(q, pages, block_tables, query_start, seq_lens, *how)
    return out


@functools.cache
def compute_dtype(dtype: torch.dtype, formats: KVFormats) -> torch.dtype:
    """In which attention multiplies q of `dtype` with pages of `formats`: bf16 where q is bf16 and K and V are that or
    codes of at most eight bits, else fp32. Sums are fp32."""
    narrow = all(format.is_quantised or format is KVFormat.BF16 for format in formats)
    return torch.bfloat16 if dtype is torch.bfloat16 and narrow else torch.float32


def copy_blocks(pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copies whole blocks inside `pool` (uint8 [blocks, block_bytes]): (source, destination) pairs, in order."""
    _assert_pool(pool)
    assert pool.shape[1] % PAGE == 0, pool.shape
    _serve("copy_blocks", pool)(pool, pairs)


def gather_blocks(pool: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copies blocks `ids` (int64 [n]) of `pool` (uint8 [blocks, block_bytes]) into `out` (uint8 [n, block_bytes])."""
    _check_swap(pool, ids, out)
    _serve("gather_blocks", pool)(pool, ids, out)


def scatter_blocks(source: torch.Tensor, ids: torch.Tensor, pool: torch.Tensor) -> None:
    """Copies `source` (uint8 [n, block_bytes]) into blocks `ids` (int64 [n], each another one) of `pool`."""
    _check_swap(pool, ids, source)
    _serve("scatter_blocks", pool)(source, ids, pool)


def softmax_weights(
    x: torch.Tensor, temperature: torch.Tensor, shifted: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Numerators of the softmax of x / temperature, and sums of them. x: fp32 [R, LANES x G], each row's maximum
    finite; temperature: fp32 [R], positive -> fp32 [R, G].

    Writes shifted [R, LANES x G]: (x - the row's maximum) / temperature; it may be x itself. And weights, likewise:
    exp(shifted) within 1e-6 of it (2e-5 by the portable kernels, which have no fused multiply-add), and as little as 0
    below 2^-126. Sum g is that of numbers g, g + G, g + 2 G, … of a row of weights, by halving: number j is added to
    number j + half of the width, again and again, until G are left.
    """
    assert x.dim() == 2 and x.shape[1] % LANES == 0 and temperature.shape == x.shape[:1], (x.shape, temperature.shape)
    assert temperature.dtype == torch.float32 and temperature.is_contiguous(), temperature
    for each in (x, shifted, weights):
        assert each.shape == x.shape and each.dtype == torch.float32 and _dense(each), (each.shape, each.dtype)
    sums: torch.Tensor = _serve("softmax_weights", x)(x, temperature, shifted, weights)
    return sums


def draw_truncated(
    x: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """A token for each of `rows` (int64 [N]) of x, drawn from what top-k, then top-p, then min-p leave: int64 [N].

    x: fp32 [R, W], logits over temperature, each row's maximum 0, W a multiple of LANES; weights: fp32 [R, W], exp(x).
    top_k: int64 [N], 0: off; top_p, min_p: fp64 [N], 1 and 0: off; uniform: fp64 [N] in [0, 1), at most 52 bits.

    Tokens are ordered by x, the most likely first, of equals the lower one; those of -inf are never drawn. Top-k keeps
    the first k, top-p (Holtzman et al. 2020) the fewest that reach p of the weight of what top-k left, min-p (Nguyen et
    al. 2024) those at least min_p times as likely as the first. The token is the first with which the sum of weights,
    in that order, exceeds uniform x the weight of what is kept. Sums are in fp64.
    """
    assert x.dim() == 2 and x.shape == weights.shape and x.shape[1] % LANES == 0, (x.shape, weights.shape)
    assert x.dtype == weights.dtype == torch.float32 and _dense(x) and _dense(weights), (x.dtype, weights.dtype)
    for each in (rows, top_k, top_p, min_p, uniform):
        assert each.shape == rows.shape and each.dim() == 1 and each.is_contiguous(), (each.shape, each.stride())
    assert rows.dtype == top_k.dtype == torch.int64, (rows.dtype, top_k.dtype)
    assert top_p.dtype == min_p.dtype == uniform.dtype == torch.float64, (top_p.dtype, min_p.dtype, uniform.dtype)
    drawn: torch.Tensor = _serve("draw_truncated", x)(x, weights, rows, top_k, top_p, min_p, uniform)
    return drawn


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """A token for each row of logits [S, V], drawn from what top-k, then top-p, then min-p leave: int64 [S]; -1 where a
    row has a NaN or no finite maximum. Any row stride, V at most `LARGEST_VOCABULARY`. For where logits are: nothing
    waits for a CPU.

    temperature: fp32 [S], below 1e-5: the lowest token of the maximum; top_k: int32 [S], 0: off; top_p, min_p: fp32
    [S], 1 and 0: off. What is kept is what `draw_truncated` says, but tokens are ordered by their logits. It is drawn
    by the largest of random scores, of which there is one for each token, a function of seeds, choices and positions
    (int64 [S]: 64 bits, 32 bits and the place of the token to draw in its sequence) and of the token: formulas in
    `reference.sampling`. All implementations draw the same.
    """
    columns = temperature, top_k, top_p, min_p, seeds, choices, positions
    assert logits.dim() == 2 and 1 <= logits.shape[1] <= LARGEST_VOCABULARY, logits.shape
    assert logits.is_floating_point() and _dense(logits), (logits.dtype, logits.stride())
    for column in columns:
        assert column.shape == logits.shape[:1] and column.is_contiguous(), (column.shape, column.stride())
    assert temperature.dtype == top_p.dtype == min_p.dtype == torch.float32, (temperature.dtype, top_p.dtype)
    assert top_k.dtype == torch.int32 and seeds.dtype == choices.dtype == positions.dtype == torch.int64, top_k.dtype
    drawn: torch.Tensor = _serve("draw", logits)(logits, *columns)
    return drawn


def _serve(op: str, tensor: torch.Tensor, formats: KVFormats | None = None, backend: str = AUTO) -> Any:
    return choose(op, "cpu" if tensor.is_cpu else tensor.device.type, tensor.dtype, formats, backend).function


def _dense(x: torch.Tensor) -> bool:
    """The last dim is contiguous."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def _rows_dense(x: torch.Tensor) -> bool:
    """[T, H, D] with heads and dims contiguous inside a row."""
    (_, heads, dims), (_, head_stride, dim_stride) = x.shape, x.stride()
    return dim_stride == 1 and (head_stride == dims or heads == 1)


def _check_rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    assert q.dim() == k.dim() == 3 and q.shape[0] == k.shape[0] == positions.shape[0], (q.shape, k.shape)
    assert q.shape[2] == k.shape[2] >= 2 * cos.shape[1] and cos.shape == sin.shape, (q.shape, k.shape, cos.shape)
    assert q.dtype == k.dtype and cos.dtype == sin.dtype == torch.float32 and positions.dtype == torch.int64
    assert _rows_dense(q) and _rows_dense(k), (q.stride(), k.stride())
    assert positions.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()


def _check_swap(pool: torch.Tensor, ids: torch.Tensor, dense: torch.Tensor) -> None:
    _assert_pool(pool)
    _assert_pool(dense)
    assert ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_contiguous(), ids
    assert dense.shape == (len(ids), pool.shape[1]) and pool.shape[1] % PAGE == 0, (dense.shape, ids.shape, pool.shape)
    assert ids.device == dense.device == pool.device, (ids.device, dense.device, pool.device)


def _assert_pool(pool: torch.Tensor) -> None:
    assert pool.dim() == 2 and pool.dtype == torch.uint8 and pool.is_contiguous(), (pool.shape, pool.dtype)
