"""Attention without pages: whole sequences, plain torch. For tests of models apart from any KV pool."""

from itertools import pairwise

import torch
from torch.nn import functional

from configs.decoder import DecoderConfig
from engine.model.interface import AttentionLayer, ForwardBatch


class ContiguousAttention:
    """An `AttentionBackend` for steps in which every sequence is computed from its first token."""

    def __init__(self, config: DecoderConfig) -> None:
        self.windows = config.layer_windows

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        assert layer.softcap is None and layer.sinks is None, "no family of ours asks for them"
        starts = batch.query_start.tolist()
        rows = [slice(start, end) for start, end in pairwise(starts)]
        assert [part.stop - part.start for part in rows] == batch.seq_lens.tolist(), "whole sequences only"
        return torch.cat([self._attend(layer, q[part], k[part], v[part]) for part in rows])

    def _attend(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (distance >= 0) & (distance < (self.windows[layer.index] or len(q)))
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        grouped = q.shape[1] != k.shape[1]
        out = functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=layer.scale, enable_gqa=grouped)
        return out[0].transpose(0, 1).flatten(1)


def whole_sequences(sequences: list[list[int]], logit_rows: list[int] | None = None) -> ForwardBatch:
    """A step that computes each sequence from its first token; logits of `logit_rows`, all rows by default."""
    lengths = [len(sequence) for sequence in sequences]
    ids = [token for sequence in sequences for token in sequence]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ForwardBatch(
        input_ids=torch.tensor(ids),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        slot_mapping=(torch.arange(len(ids)),),
        query_start=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=(torch.zeros(len(lengths), 1, dtype=torch.int32),),
        logit_rows=torch.tensor(range(len(ids)) if logit_rows is None else logit_rows, dtype=torch.int64),
    )
