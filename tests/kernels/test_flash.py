"""flash-attn as a backend: what it is given, what it is not, and where it does not serve. The library itself is
`flash_library`'s: nothing here ran on a GPU."""

import itertools
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from error_rule import assert_near
from flash_library import FlashLibrary
from hypothesis import given
from hypothesis import strategies as st
from paged import make_paged, plain_attention

from configs.kv import KVFormat, KVOrder, LayerKV
from kernels import flash, ops, reference
from kernels.flash import PAGE, Flash2, Flash3, refuses_layer, runs_of
from kernels.ops import HostLengths, OwnRows
from kernels.registry import NoImplementation, Refused, choose

BF16 = (KVFormat.BF16, KVFormat.BF16)
PARTS = {
    "decoding": [(0, 32, 33), (1, 0, 1), (2, 299, 300), (3, 15, 16)],
    "mixed": [(3, 15, 16), (2, 299, 300), (0, 0, 33), (1, 0, 1), (4, 5, 40), (5, 0, 17), (2, 250, 299)],
    "prompts": [(0, 0, 33), (5, 0, 17), (3, 0, 16)],
}
"""(sequence, first row, last row)"""
LENGTHS = [33, 1, 300, 16, 40, 17]
HOPPER = "is for compute capability 9.0 (Hopper), not"
WAYS = pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 1.5), (1, 2.0)])


class Call:
    """Rows of sequences in a pool as a GPU has it."""

    def __init__(self, parts, block_size, dtype=torch.bfloat16, **options):
        """Unused bytes are NaN, unless given."""
        self.paged = make_paged(LENGTHS, block_size=block_size, dtype=dtype, order=KVOrder.ROWS, **options)
        b = [each[0] for each in parts]
        self.parts, self.pages = parts, self.paged.pages()
        rows = [last - first for _, first, last in parts]
        self.q, self.k, self.v = (
            torch.cat([x[b][first:last] for b, first, last in parts])
            for x in (self.paged.q, self.paged.k, self.paged.v)
        )
        self.tables = self.paged.tables[b].contiguous()
        self.starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
        self.lengths = torch.tensor([last for _, _, last in parts], dtype=torch.int32)
        self.own = OwnRows(self.k, self.v, HostLengths(np.array(rows), self.lengths.numpy().astype(np.int64)))

    def run(self, kernel, window=None, softcap=None, own=None):
        where = self.pages, self.tables, self.starts, self.lengths
        return kernel(self.q, *where, self.paged.scale, window, softcap, None, own)

    def check(self, out, window=None, softcap=None):
        """By flash-attn's own rule."""
        assert out.shape == (len(self.q), self.q.shape[1] * self.q.shape[2])
        found = out.split([last - first for _, first, last in self.parts])
        for rows, (b, first, last) in zip(found, self.parts, strict=True):
            given = self.paged.q[b][first:last], self.paged.k[b][:last], self.paged.v[b][:last]
            how = self.paged.scale, window, softcap
            assert_near(rows, plain_attention(*given, *how), plain_attention(*(x.float() for x in given), *how))


@pytest.fixture
def others(monkeypatch):
    """What serves where nobody is named: the reference here. Notes how many rows it gets."""
    rows = []

    def attend(q, *given):
        rows.append(len(q))
        return reference.paged_attention(q, *given)

    monkeypatch.setattr(flash, "choose", lambda *asked: SimpleNamespace(function=attend))
    return rows


# ------------------------------------------------------------------ flash-attn 3
@WAYS
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.bfloat16), (32, torch.float16)])
def test_flash_3_serves_all_rows_in_one_call(kind, window, softcap, block_size, dtype, library: FlashLibrary):
    """A window reads what lies before it in the same tile, which must be no address outside the pool."""
    call = Call(PARTS[kind], block_size, dtype, poison=0xFF if window is None else 0)
    if window is not None:
        for table, (_, first, _) in zip(call.tables, PARTS[kind], strict=True):
            table[: max(0, first + 1 - window) // block_size] = 2**31 - 1
    out = call.run(Flash3(library.with_kvcache_3), window, softcap)
    call.check(out, window, softcap)
    [(_, asked)] = library.calls
    pool, (k_part, v_part) = call.pages.pool, call.pages.halves
    for cache, part in ((asked["k_cache"], k_part.codes), (asked["v_cache"], v_part.codes)):
        assert cache.data_ptr() == pool.data_ptr() + part.offset, "a view, no copy"
        assert cache.shape == (len(pool), block_size, 2, 64) and cache.stride(0) == pool.shape[1] // 2
    assert asked["cu_seqlens_q"] is call.starts and asked["cache_seqlens"] is call.lengths


def test_flash_3_takes_one_row_a_sequence_as_it_takes_several(library: FlashLibrary):
    for own in (None, Call(PARTS["decoding"], 16).own):
        call = Call(PARTS["decoding"][:1], 16)
        call.run(Flash3(library.with_kvcache_3), own=own)
        assert library.calls.pop()[1]["max_seqlen_q"] == 2
    call = Call(PARTS["mixed"], 16)
    call.run(Flash3(library.with_kvcache_3), own=call.own)
    assert library.calls.pop()[1]["max_seqlen_q"] == 49


def test_views_are_made_once_and_go_with_the_pages(library: FlashLibrary):
    kernel, call = Flash3(library.with_kvcache_3), Call(PARTS["decoding"], 16)
    for _ in range(2):
        call.run(kernel)
    (_, first), (_, second) = library.calls
    assert first["k_cache"] is second["k_cache"] and len(kernel._views) == 1
    del call
    library.calls.clear()
    assert not kernel._views


def test_pages_as_a_cpu_reads_them_are_refused(library: FlashLibrary):
    call = Call(PARTS["decoding"], 16)
    call.pages = make_paged(LENGTHS).pages()
    with pytest.raises(AssertionError, match="PAIRED"):
        call.run(Flash3(library.with_kvcache_3))


# ------------------------------------------------------------------ flash-attn 2, small pages
@WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_2_serves_prompts_of_which_nothing_is_cached(window, softcap, dtype, others, library: FlashLibrary):
    call = Call(PARTS["mixed"], 16, dtype)
    out = call.run(Flash2(library.varlen, library.with_kvcache_2), window, softcap, call.own)
    call.check(out, window, softcap)
    assert others == [2, 1 + 35, 49], "one row, or earlier context"
    (first, one), (second, other) = library.calls
    assert first == second == "varlen" and one["block_table"] is other["block_table"] is None
    assert one["k"].data_ptr() == call.k[2:].data_ptr() and one["v"].data_ptr() == call.v[2:].data_ptr(), "no copy"
    assert one["cu_seqlens_q"].tolist() == one["cu_seqlens_k"].tolist() == [0, 33]
    assert one["max_seqlen_q"] == one["max_seqlen_k"] == 33
    assert other["cu_seqlens_q"].tolist() == [0, 17] and len(other["q"]) == 17


def test_flash_2_takes_neighbours_together(others, library: FlashLibrary):
    call = Call(PARTS["prompts"], 16)
    call.check(call.run(Flash2(library.varlen, library.with_kvcache_2), own=call.own))
    [(_, asked)] = library.calls
    assert asked["cu_seqlens_q"].tolist() == [0, 33, 50, 66] and asked["max_seqlen_q"] == 33 and not others


@pytest.mark.parametrize("kind", ["decoding", "nothing known of its rows"])
def test_flash_2_leaves_all_else_to_others_as_it_is(kind, monkeypatch, library: FlashLibrary):
    call = Call(PARTS.get(kind, PARTS["prompts"]), 16)
    expected, given = object(), []
    others = SimpleNamespace(function=lambda *asked: given.append(asked) or expected)
    monkeypatch.setattr(flash, "choose", lambda *asked: others)
    own = call.own if kind in PARTS else None
    assert call.run(Flash2(library.varlen, library.with_kvcache_2), 9, 2.0, own) is expected
    where = call.q, call.pages, call.tables, call.starts, call.lengths
    assert len(given) == 1 and all(one is other for one, other in zip(given[0], where, strict=False))
    assert given[0][5:] == (call.paged.scale, 9, 2.0) and not library.calls


@pytest.mark.parametrize("stride", [1, 3])
def test_rows_that_begin_anywhere_are_copied(stride, library: FlashLibrary):
    """q, k and v are often parts of one tensor; the library loads 16 bytes at once."""
    call = Call(PARTS["prompts"], 16)
    wide = torch.zeros(len(call.q), call.q[0].numel() + stride, dtype=call.q.dtype)
    odd = wide[:, stride:].view(call.q.shape)
    odd.copy_(call.q)
    call.q = odd
    call.check(call.run(Flash2(library.varlen, library.with_kvcache_2), own=call.own))
    call.check(call.run(Flash3(library.with_kvcache_3)))
    fused = torch.zeros(len(odd), odd[0].numel() + 64, dtype=odd.dtype)[:, 64:].view(odd.shape)
    assert flash.aligned(fused) is fused


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=8))
def test_runs_are_all_sequences_in_order(sequences):
    """(rows, tokens before them)"""
    rows, before = (np.array(column) for column in zip(*sequences, strict=True))
    runs = list(runs_of(HostLengths(rows, rows + before)))
    assert [b for run in runs for b in range(len(rows))[run.sequences]] == list(range(len(rows)))
    assert [row for run in runs for row in range(rows.sum())[run.rows]] == list(range(rows.sum()))
    for run in runs:
        assert all((rows[run.sequences] > 1) & (before[run.sequences] == 0)) == run.is_fresh
        assert run.longest == rows[run.sequences].max()
        assert run.rows.stop - run.rows.start == rows[run.sequences].sum()
    assert all(one.is_fresh != other.is_fresh for one, other in itertools.pairwise(runs))


@pytest.mark.parametrize(("rows", "count"), [([1, 1, 5, 1], 2), ([1, 1], 2), ([2, 1], 0), ([0, 1], 0), ([], 0)])
def test_sequences_that_decode_come_first(rows, count):
    rows = np.array(rows, np.int64)
    assert HostLengths(rows, rows).num_decodes == count


# ------------------------------------------------------------------ flash-attn 2, large pages
@WAYS
@pytest.mark.parametrize("kind", PARTS)
def test_flash_2_reads_large_pages(kind, window, softcap, others, library: FlashLibrary):
    call = Call(PARTS[kind], PAGE)
    kernel = Flash2(library.varlen, library.with_kvcache_2)
    call.check(call.run(kernel, window, softcap, call.own), window, softcap)
    names = {"decoding": ["with_kvcache"], "mixed": ["with_kvcache", "varlen"], "prompts": ["varlen"]}
    assert [name for name, _ in library.calls] == names[kind] and not others
    for name, asked in library.calls:
        cache = asked["k_cache" if name == "with_kvcache" else "k"]
        assert cache.data_ptr() == call.pages.pool.data_ptr() + call.pages.halves[0].codes.offset


@WAYS
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("version", ["2.8.4", "2.9.0.post1+cu130", "2.10"])
def test_flash_2_is_not_left_to_wait_for_the_device(version, kind, window, softcap, monkeypatch, library: FlashLibrary):
    library.install(monkeypatch, 2)
    monkeypatch.setattr(sys.modules["flash_attn"], "__version__", version)
    kernel = choose("paged_attention", "cuda", torch.bfloat16, BF16, flash.BACKEND).function
    call = Call(PARTS[kind], PAGE)
    call.check(call.run(kernel, window, softcap, call.own), window, softcap)
    assert [name for name, _ in library.calls] == ["varlen"]


@pytest.mark.parametrize("release", [2, 3])
def test_rows_without_tokens_get_zeros(release, library: FlashLibrary):
    """As padded steps have them; the rows beside them get what is theirs."""
    kernel = Flash3(library.with_kvcache_3) if release == 3 else Flash2(library.varlen, library.with_kvcache_2)
    call = Call(PARTS["decoding"], PAGE)
    full = call.run(kernel, own=call.own)
    call.lengths[1:3] = 0
    out = call.run(kernel, own=call.own)
    assert not out[1:3].any() and torch.equal(out[[0, 3]], full[[0, 3]])


def test_flash_2_reads_large_pages_of_rows_of_which_nothing_is_known(library: FlashLibrary):
    call = Call(PARTS["mixed"], PAGE)
    call.check(call.run(Flash2(library.varlen, library.with_kvcache_2)))
    assert [name for name, _ in library.calls] == ["varlen"]
    call = Call(PARTS["decoding"][:1], PAGE)
    call.check(call.run(Flash2(library.varlen, library.with_kvcache_2)))
    assert library.calls[-1][1]["max_seqlen_q"] == 2


# ------------------------------------------------------------------ who serves
def refusals(dtype=torch.bfloat16, device="cuda", formats=BF16):
    """Of the two releases, where the backend is named and neither serves."""
    with pytest.raises(NoImplementation) as caught:
        choose("paged_attention", device, dtype, formats, flash.BACKEND)
    found = dict(caught.value.refused)
    assert found.pop(reference.NAME) == "--attention-backend flash-attn"
    return found["flash-attn 3"], found["flash-attn 2"]


def test_the_newer_release_is_preferred_where_it_runs(monkeypatch, library: FlashLibrary):
    library.install(monkeypatch, 2, 3)
    choice = choose("paged_attention", "cuda", torch.bfloat16, BF16, flash.BACKEND)
    assert choice.name == "flash-attn 3" and choice.function == Flash3(library.with_kvcache_3)
    assert dict(choice.refused)["flash-attn 2"] == "flash-attn 3 is preferred"
    choose.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    choice = choose("paged_attention", "cuda", torch.float16, (KVFormat.FP16,) * 2, flash.BACKEND)
    assert choice.name == "flash-attn 2"
    assert choice.function == Flash2(library.varlen, library.with_kvcache_2)
    assert dict(choice.better)["flash-attn 3"] == "is for compute capability 9.0 (Hopper), not 8.6"


def test_it_is_never_chosen_unasked(monkeypatch, library: FlashLibrary):
    library.install(monkeypatch, 2, 3)
    monkeypatch.setattr(flash, "_imported", lambda name: pytest.fail("not even loaded"))
    choice = choose("paged_attention", "cuda", torch.bfloat16, BF16)
    assert "flash" not in choice.name
    reasons = {reason for name, reason in choice.refused if name in (flash.FLASH_2, flash.FLASH_3)}
    assert reasons == {"on request only (--attention-backend flash-attn)"}


def test_refusals_one_by_one(monkeypatch, library: FlashLibrary):
    three, two = refusals()
    assert three == "flash_attn_interface is not installed (docs/gpu.md says how it is installed)"
    assert two == "flash_attn is not installed (docs/gpu.md says how it is installed)"
    library.install(monkeypatch, 2, 3)
    assert set(refusals(device="cpu")) == {"runs on a GPU, not on cpu"}
    assert set(refusals(torch.float32, formats=(KVFormat.FP32,) * 2)) == {
        "computes in bfloat16 and float16, not in float32"
    }
    for formats in ((KVFormat.INT8, KVFormat.BF16), (KVFormat.BF16, KVFormat.INT8)):
        assert set(refusals(formats=formats)) == {"reads pages in bfloat16, not in int8"}
    assert set(refusals(formats=(KVFormat.FP16,) * 2)) == {"reads pages in bfloat16, not in fp16"}
    assert set(refusals(torch.float16)) == {"reads pages in float16, not in bf16"}


@pytest.mark.parametrize(
    ("capability", "three", "two"),
    [
        ((7, 5), HOPPER, "needs compute capability 8.0 (Ampere), and this is"),
        ((8, 9), HOPPER, None),
        ((10, 0), HOPPER, None),
        ((9, 0), None, None),
    ],
)
def test_generations_of_gpus(capability, three, two, monkeypatch, library: FlashLibrary):
    library.install(monkeypatch, 2, 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for offer, reason in ((flash.offer_3, three), (flash.offer_2, two)):
        found = offer("cuda", torch.bfloat16)
        version = ".".join(map(str, capability))
        assert (found.reason if isinstance(found, Refused) else None) == (reason and f"{reason} {version}")


def test_amd_is_refused(monkeypatch, library: FlashLibrary):
    library.install(monkeypatch, 2, 3)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert set(refusals()) == {"runs on an NVIDIA GPU, not on ROCm"}


def test_builds_that_do_not_do(monkeypatch, library: FlashLibrary):
    """For another torch; too old; of flash-attn 4, which has the name and not the functions."""
    library.install(monkeypatch, 2)
    module = sys.modules["flash_attn"]

    def broken(name):
        raise ImportError("undefined symbol: _ZN3c105ErrorC2E\nand more")

    with monkeypatch.context() as patched:
        patched.setattr(flash.importlib, "import_module", broken)
        [found] = {offer.reason for offer in [flash.offer_2("cuda", torch.bfloat16)]}
    assert found.startswith("flash_attn is installed and cannot be loaded: undefined symbol: _ZN3c105ErrorC2E (docs")

    def old(q, k, v, window_size=(-1, -1), num_splits=0):
        pytest.fail("not to be called")

    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, old)
            found = flash.offer_2("cuda", torch.bfloat16)
        assert isinstance(found, Refused)
        assert found.reason.startswith(f"flash_attn 2.8.3 is too old: {name} has no softcap, block_table (docs")
    monkeypatch.delattr(module, "flash_attn_varlen_func")
    monkeypatch.delattr(module, "__version__")
    found = flash.offer_2("cuda", torch.bfloat16)
    assert isinstance(found, Refused)
    assert found.reason.startswith("flash_attn without a version has no flash_attn_varlen_func (docs")
    assert isinstance(module, ModuleType) and not library.calls


def test_layers_that_it_cannot_serve():
    for head_dim in (8, 64, 96, 128, 256):
        assert refuses_layer(LayerKV(2, head_dim, KVFormat.BF16, window=7), has_sinks=False) is None
    for head_dim in (12, 260, 512):
        words = f"takes heads of a multiple of 8 dims up to 256, not of {head_dim}"
        assert refuses_layer(LayerKV(2, head_dim, KVFormat.BF16), has_sinks=False) == words
    assert refuses_layer(LayerKV(2, 64, KVFormat.BF16), has_sinks=True) == "has no attention sinks"
    call = Call(PARTS["decoding"], 16)
    where = call.q, call.pages, call.tables, call.starts, call.lengths, call.paged.scale
    for kernel in (Flash2(len, len), Flash3(len)):
        with pytest.raises(AssertionError, match="no sinks"):
            kernel(*where, None, None, torch.zeros(6))


# ------------------------------------------------------------------ the op
def test_the_op_asks_for_the_backend_and_hands_the_rows_on(monkeypatch):
    call, asked, given = Call(PARTS["prompts"], 16), [], []

    def chosen(*question):
        asked.append(question)
        return SimpleNamespace(function=lambda *arguments: given.append(arguments))

    monkeypatch.setattr(ops, "choose", chosen)
    where = call.q, call.pages, call.tables, call.starts, call.lengths, call.paged.scale
    ops.paged_attention(*where)
    ops.paged_attention(*where, backend=flash.BACKEND, own=call.own)
    assert asked == [("paged_attention", "cpu", torch.bfloat16, BF16, name) for name in ("auto", "flash-attn")]
    assert given == [(*where, None, None, None), (*where, None, None, None, call.own)]


def test_own_rows_are_like_each_other():
    k = torch.zeros(3, 2, 8)
    lengths = HostLengths(np.array([3]), np.array([3]))
    OwnRows(torch.zeros(3, 40)[:, :16].view(3, 2, 8), k, lengths)
    for other in (k[:2], k.half(), torch.zeros(3, 8, 2).mT):
        with pytest.raises(AssertionError):
            OwnRows(k, other, lengths)
