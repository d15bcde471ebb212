"""Norms, rotary embedding, gates, rows of tables, each in one pass over memory. Contracts: `kernels.ops`.

fp32 inside, rounded where the reference rounds. Products are not fused with sums (`PLAIN`), so that a GPU has the
reference's bits wherever no order of additions and no exponential is involved.
"""

import torch
import triton
import triton.language as tl

from kernels.ops import Gate
from kernels.triton.codes import narrowed, widened
from kernels.triton.device import PLAIN

TILE = 2048
"""Numbers of rows, where rows are short, that a program norms."""
HALF_TILE = 1024
"""First numbers of pairs, in some heads of a token, that a program turns."""
CHUNK = 1024
"""Numbers of a row that a program gates or copies."""


# ------------------------------------------------------------------ norms
@triton.jit
def _normed(
    x: tl.tensor, scale: tl.tensor, weight: tl.tensor, inside: tl.tensor, DTYPE: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """x * scale * weight, rounded to DTYPE; before the weight is multiplied too, unless that is WIDE."""
    normed = x * scale
    if not WIDE:
        normed = widened(narrowed(normed, DTYPE))
    return narrowed(normed * widened(tl.load(weight, inside, other=0.0)), DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x: tl.tensor,
    x_stride: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS rows, of HEADS each of x's rows. With a residual x is added to it first, and its norm is taken."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (dim < WIDTH)
    at = (row // HEADS).to(tl.int64) * x_stride + row % HEADS * WIDTH + dim
    wide = widened(tl.load(x + at, inside, other=0.0))
    if residual is not None:
        sums = residual + row.to(tl.int64) * residual_stride + dim
        total = narrowed(wide + widened(tl.load(sums, inside, other=0.0)), x.dtype.element_ty)
        tl.store(sums, total, inside)
        wide = widened(total)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    normed = _normed(wide, scale, weight + dim, dim < WIDTH, x.dtype.element_ty, WIDE)
    tl.store(out + row.to(tl.int64) * WIDTH + dim, normed, inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch_norm(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch_norm(x, residual, weight, eps)


def _launch_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    heads, width = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    residual_stride = 0 if residual is None else residual.stride(0)
    _norm[triton.cdiv(x.shape[0] * heads, rows),](
        x, x.stride(0), residual, residual_stride, weight, out, eps, x.shape[0] * heads,
        HEADS=heads, WIDTH=width, WIDE=weight.dtype is torch.float32, ROWS=rows, BLOCK=block,
        num_warps=min(16, rows * block // 512), **PLAIN,
    )  # fmt: skip
    return out


# ------------------------------------------------------------------ rotary embedding
@triton.jit
def _turn(
    x: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    head: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    COUNT: tl.constexpr,
    DIMS: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Heads `head` ([heads, 1]) of a token's COUNT at x: normed, where there is a weight, then turned."""
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < COUNT) & (pair < HALF)
    first = x + head * DIMS + pair
    a, b = widened(tl.load(first, inside, other=0.0)), widened(tl.load(first + HALF, inside, other=0.0))
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1)
        if REST > 0:  # dims that do not turn
            dim = 2 * HALF + tl.arange(0, REST)[None, :]
            rests, in_rest = x + head * DIMS + dim, (head < COUNT) & (dim < DIMS)
            rest = widened(tl.load(rests, in_rest, other=0.0))
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIMS + eps)[:, None]
        if REST > 0:
            tl.store(rests, _normed(rest, scale, weight + dim, dim < DIMS, x.dtype.element_ty, WIDE), in_rest)
        a = widened(_normed(a, scale, weight + pair, pair < HALF, x.dtype.element_ty, WIDE))
        b = widened(_normed(b, scale, weight + HALF + pair, pair < HALF, x.dtype.element_ty, WIDE))
    tl.store(first, narrowed(a * cos - b * sin, x.dtype.element_ty), inside)
    tl.store(first + HALF, narrowed(b * cos + a * sin, x.dtype.element_ty), inside)


@triton.jit
def _rotary(
    q: tl.tensor,
    q_stride: tl.tensor,
    q_weight: tl.tensor,
    k: tl.tensor,
    k_stride: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """HEADS heads of one token, of q or of k."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    angle = tl.load(positions + token) * HALF + pair
    c = tl.load(cos + angle, pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, pair < HALF, other=0.0)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    if block < Q_BLOCKS:
        x = q + token * q_stride
        _turn(x, q_weight, eps, head + block * HEADS, c, s, Q_HEADS, DIMS, HALF, WIDE, BLOCK, REST)
    else:
        x = k + token * k_stride
        _turn(x, k_weight, eps, head + (block - Q_BLOCKS) * HEADS, c, s, K_HEADS, DIMS, HALF, WIDE, BLOCK, REST)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    _launch_rotary(q, k, None, None, 0.0, positions, cos, sin)


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
    _launch_rotary(q, k, q_weight, k_weight, eps, positions, cos, sin)


def _launch_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    (tokens, q_heads, dims), k_heads, half = q.shape, k.shape[1], cos.shape[1]
    block = triton.next_power_of_2(max(half, 1))
    heads = min(max(1, HALF_TILE // block), triton.next_power_of_2(max(q_heads, k_heads)))
    rest = dims - 2 * half
    _rotary[tokens, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads)](
        q, q.stride(0), q_weight, k, k.stride(0), k_weight, eps, positions, cos, sin,
        Q_HEADS=q_heads, K_HEADS=k_heads, DIMS=dims, HALF=half,
        WIDE=q_weight is not None and q_weight.dtype is torch.float32,
        HEADS=heads, BLOCK=block, REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=max(1, min(4, heads * block // 256)), **PLAIN,
    )  # fmt: skip


# ------------------------------------------------------------------ gates
@triton.jit
def _gate(
    x: tl.tensor, x_stride: tl.tensor, out: tl.tensor, HALF: tl.constexpr, TANH: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Both gates are g * sigmoid(z): of SiLU z is g; 1 + tanh(z / 2), of GELU's approximation, is 2 sigmoid(z)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < HALF
    gates = x + row * x_stride + at
    g, up = widened(tl.load(gates, inside, other=0.0)), widened(tl.load(gates + HALF, inside, other=0.0))
    z = g
    if TANH:
        z = 1.5957691216057308 * (g + 0.044715 * (g * g * g))  # 2 sqrt(2 / pi)
    gated = widened(narrowed(g / (1.0 + tl.exp(-z)), x.dtype.element_ty))
    tl.store(out + row * HALF + at, narrowed(gated * up, x.dtype.element_ty), inside)


def gate_mul(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    rows, half = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, half), dtype=x.dtype, device=x.device)
    _gate[rows, triton.cdiv(half, CHUNK)](
        x, x.stride(0), out, HALF=half, TANH=gate == "gelu_tanh", CHUNK=CHUNK, num_warps=4, **PLAIN
    )
    return out


# ------------------------------------------------------------------ rows of tables
@triton.jit
def _gather(
    table: tl.tensor,
    table_stride: tl.tensor,
    indices: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    SCALES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = at < WIDTH
    numbers = tl.load(table + tl.load(indices + row) * table_stride + at, inside, other=0.0)
    if SCALES:
        numbers = narrowed(widened(numbers) * scale, table.dtype.element_ty)
    tl.store(out + row * WIDTH + at, numbers, inside)


def gather_rows(table: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    rows, width = indices.shape[0], table.shape[1]
    out = torch.empty((rows, width), dtype=table.dtype, device=table.device)
    _gather[rows, triton.cdiv(width, CHUNK)](
        table, table.stride(0), indices, scale, out,
        WIDTH=width, SCALES=scale != 1.0, CHUNK=CHUNK, num_warps=4, **PLAIN,
    )  # fmt: skip
    return out
