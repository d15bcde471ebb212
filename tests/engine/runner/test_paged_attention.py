"""What attention over the pages asks the kernels for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.kv import KVFormat, KVLayout, LayerKV
from engine.model.interface import AttentionLayer, ForwardBatch
from engine.runner.attention.paged import PagedAttention
from engine.runner.kv_store import PagedStore, allocate_pool
from engine.runner.refresh import RefreshAttention
from kernels import ops
from kernels.ops import HostLengths

LENGTHS = HostLengths(np.array([3]), np.array([3]))
CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch):
    """Of each call of `ops.paged_attention`: the backend, and the rows' own K and V."""
    calls = []

    def attend(q, *given):
        call = dict(zip(("window", "softcap", "sinks", "backend", "own"), given[5:], strict=False))
        calls.append((call["backend"], call.get("own")))
        return q.flatten(1)

    monkeypatch.setattr(ops, "paged_attention", attend)
    monkeypatch.setattr(ops, "store_kv", lambda *given: None)
    return calls


def attention_of(format: KVFormat, backend: str) -> tuple[PagedAttention, KVLayout]:
    layout = KVLayout.of((LayerKV(2, 32, format),), 8)
    pools = [allocate_pool(1, group.spec.block_bytes, CPU) for group in layout.groups]
    return PagedAttention(PagedStore(pools, layout), layout, backend), layout


@pytest.mark.parametrize("lengths", [LENGTHS, None], ids=["known", "unknown"])
@pytest.mark.parametrize("backend", ["auto", "reference", "flash-attn"])
def test_only_flash_attn_is_given_the_rows_themselves(backend, lengths, asked):
    attention, _ = attention_of(KVFormat.FP32, backend)
    rows, ends = torch.arange(3), torch.tensor([0, 3], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = ForwardBatch(rows, rows, (rows,), ends, ends[1:], (table,), rows, lengths=lengths)
    q, k, v = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    attention.forward(AttentionLayer(0, 0.2), q, k, v, batch)
    [(name, own)] = asked
    assert name == backend
    if backend == "flash-attn" and lengths is not None:
        assert own.k is k and own.v is v and own.lengths is lengths
    else:
        assert own is None


def test_a_refresh_is_computed_by_the_same_backend(asked):
    attention, layout = attention_of(KVFormat.INT8, "reference")
    refresh = RefreshAttention(attention, layout, KVFormat.FP32, 64, CPU)
    batch = SimpleNamespace(slot_mapping=(None,), positions=None, query_start=None, seq_lens=None)
    x = torch.zeros(3, 2, 32)
    refresh.forward(AttentionLayer(0, 0.2), x, x, x, batch)
    assert asked == [("reference", None)]
