"""Draws from what top-k, top-p and min-p leave: the reference against plain Python, C++ against the reference."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ops
from kernels.cpu import library, truncation
from kernels.reference.truncation import draw_truncated, truncate
from kernels.registry import Accepted

ROOT = Path(__file__).parents[2]
LAST = 1.0 - 2.0**-52
"""The largest uniform number: draws the last token that stays."""
SHARES = torch.cat([torch.linspace(0, 1, 41, dtype=torch.float64)[:-1], torch.tensor([LAST], dtype=torch.float64)])
LIMITS = [
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (0, 0.0001, 0.0),
    (1, 1.0, 0.0),
    (50, 1.0, 0.0),
    (50, 0.9, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1.0),
    (0, 1.0, 1e-9),
    (0, 0.9, 0.05),
    (900, 0.99, 0.001),
    (5000, 0.5, 0.0),
    (5000, 1.0, 0.3),
]


def native() -> truncation.NativeDraw:
    [candidate] = truncation.CANDIDATES
    offer = candidate.offer("cpu", torch.float32)
    if not isinstance(offer, Accepted):
        pytest.skip(offer.reason)
    return offer.function


def shifted(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [R, vocab] -> x and weights as the op wants them."""
    width = -(-logits.shape[1] // 64) * 64
    x = torch.full((len(logits), width), -math.inf)
    x[:, : logits.shape[1]] = logits - logits.amax(dim=1, keepdim=True)
    return x, x.exp()


def random_rows(rows: int, vocab: int, scale: float, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).float()


def asked(pairs: list[tuple[int, tuple[int, float, float]]]) -> tuple[torch.Tensor, ...]:
    """Every row under every limits, once for each of SHARES: rows, top_k, top_p, min_p, uniform."""
    count = len(SHARES)
    rows = torch.tensor([row for row, _ in pairs]).repeat_interleave(count)
    top_k = torch.tensor([limits[0] for _, limits in pairs]).repeat_interleave(count)
    top_p, min_p = (
        torch.tensor([limits[i] for _, limits in pairs], dtype=torch.float64).repeat_interleave(count) for i in (1, 2)
    )
    return rows, top_k, top_p, min_p, SHARES.repeat(len(pairs))


def plain(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """What stays, in order, most naively."""
    weights = [math.exp(value - max(logits)) for value in logits]
    kept = sorted((token for token in range(len(logits)) if weights[token]), key=lambda t: (-weights[t], t))
    kept = kept[:top_k] if top_k else kept
    if top_p < 1.0:
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token]
            if mass >= top_p * total:
                break
        kept = nucleus
    return [token for token in kept if weights[token] >= min_p]


TIED_ROWS = st.lists(st.sampled_from([-math.inf, -4.0, -1.0, 0.0, 0.5, 0.5, 2.0, 3.0]), min_size=2, max_size=150)
ANY_LIMITS = st.tuples(
    st.sampled_from([0, 1, 2, 5, 64, 80]), st.sampled_from([1.0, 0.99, 0.7, 0.2]), st.sampled_from([0.0, 0.05, 0.5])
)


@settings(max_examples=150, deadline=None)
@given(TIED_ROWS, ANY_LIMITS)
def test_the_reference_keeps_what_plain_code_keeps(values, limits):
    values = [*values, 0.25]
    x, weights = shifted(torch.tensor([values]))
    order, sums = truncate(x[0], weights[0], *limits)
    expected = plain(values, *limits)
    assert order.tolist() == expected
    total = sum(math.exp(values[token] - max(values)) for token in expected)
    assert float(sums[-1]) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("is_native", [False, True], ids=["reference", "C++"])
def test_a_draw_inverts_the_distribution(is_native):
    x = torch.full((1, 64), -math.inf)
    weights = torch.zeros(1, 64)
    for token, weight in ((9, 1.0), (4, 0.5), (7, 0.25), (30, 0.25)):
        weights[0, token], x[0, token] = weight, math.log(weight)
    count = 8000
    uniform = torch.arange(count, dtype=torch.float64) / count  # borders between tokens among them: the next one's
    rows, ones = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.float64)
    drawn = (native() if is_native else draw_truncated)(x, weights, rows, rows + 4, ones, 0 * ones, uniform)
    assert drawn.tolist() == [9] * 4000 + [4] * 2000 + [7] * 1000 + [30] * 1000


@settings(max_examples=150, deadline=None)
@given(TIED_ROWS, ANY_LIMITS)
def test_rows_with_equals_draw_as_the_reference_does(values, limits):
    x, weights = shifted(torch.tensor([[*values, 0.25]]))
    arguments = asked([(0, limits)])
    assert torch.equal(native()(x, weights, *arguments), draw_truncated(x, weights, *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 6.0, 300.0])
def test_rows_of_any_shape_draw_as_the_reference_does(scale, dtype):
    """From flat (one bin) to so peaked that most of the row lies beyond the last bin."""
    x, weights = shifted(random_rows(1, 5003, scale, dtype=dtype))
    arguments = asked([(0, limits) for limits in LIMITS])
    assert torch.equal(native()(x, weights, *arguments), draw_truncated(x, weights, *arguments))


def test_tokens_of_no_weight_are_never_drawn():
    x, weights = shifted(torch.tensor([[0.0, -200.0, -math.inf, 0.0, -201.0]]))
    for limits in ((4, 1.0, 0.0), (60, 1.0, 0.0), (0, LAST, 0.0)):
        arguments = asked([(0, limits)])
        assert set(native()(x, weights, *arguments).tolist()) == {0, 3}
        assert set(draw_truncated(x, weights, *arguments).tolist()) == {0, 3}


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_draws_the_same_in_any_company(count, threads):
    x, weights = shifted(random_rows(4, 2000, 2.0, seed=3))
    wide_x, wide_weights = torch.full((2, 4, 2112), 7.0)
    wide_x[:, :2048], wide_weights[:, :2048] = x, weights
    arguments = asked([(row, limits) for limits in LIMITS for row in (2, 0, 3, 1)])
    one_by_one = [
        native()(x, weights, *(each[i : i + 1] for each in arguments)).item() for i in range(len(arguments[0]))
    ]
    threads(count)
    assert native()(wide_x[:, :2048], wide_weights[:, :2048], *arguments).tolist() == one_by_one


def test_contracts():
    x, weights = shifted(random_rows(2, 100, 1.0))
    good = asked([(0, (0, 0.9, 0.0))])
    assert ops.draw_truncated(x, weights, *good).shape == SHARES.shape
    for bad in (
        lambda: ops.draw_truncated(x[:, :100], weights[:, :100], *good),
        lambda: ops.draw_truncated(x, weights.double(), *good),
        lambda: ops.draw_truncated(x, weights, good[0].int(), *good[1:]),
        lambda: ops.draw_truncated(x, weights, *good[:4], good[4][:-1]),
        lambda: ops.draw_truncated(x, weights, *good[:2], good[2].float(), *good[3:]),
    ):
        with pytest.raises(AssertionError):
            bad()


def test_the_library_serves_where_it_is_loaded():
    if library.load() is None:
        pytest.skip(f"no native library: {library.refusal()}")
    x, weights = shifted(random_rows(1, 640, 1.0))
    arguments = asked([(0, (0, 0.9, 0.0))])
    assert torch.equal(ops.draw_truncated(x, weights, *arguments), native()(x, weights, *arguments))


NO_MEMORY = """
import mmap, resource, torch
from kernels.cpu.truncation import CANDIDATES

x, weights = torch.zeros(2, 1, 1 << 24)
arguments = [torch.tensor([0]), torch.tensor([5]), *torch.tensor([[1.0], [0.0], [0.5]], dtype=torch.float64)]
draw = CANDIDATES[0].offer("cpu", torch.float32).function
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), hard))  # a row takes ten times as much
try:
    draw(x, weights, *arguments)
except MemoryError as error:
    print(error)
finally:
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
print(draw(x.fill_(-1)[:, :64], weights.fill_(1)[:, :64], *arguments).item())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="nothing tells how much address space is used")
def test_no_memory_is_an_error_and_leaves_the_next_call_alone():
    """In a process of its own: what another test has freed there could be enough for the row."""
    native()
    run = subprocess.run([sys.executable, "-c", NO_MEMORY], cwd=ROOT, capture_output=True, text=True, check=True)
    error, drawn = run.stdout.splitlines()
    assert "no memory" in error and drawn == "2"
