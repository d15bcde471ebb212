"""One sequence computed whole, in pages of its own: for what is tried or measured before any request comes."""

from collections.abc import Sequence

import torch

from configs.kv import KVLayout, KVOrder, LayerKV
from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend, ForwardBatch
from engine.runner.attention.paged import PagedAttention
from engine.runner.kv_store import KVTransforms, PagedStore, allocate_pool

BLOCK_SIZE = 16


class Solo:
    """Pages for `num_tokens` tokens of one sequence, in every layer."""

    def __init__(
        self,
        model: CausalLM,
        layers: Sequence[LayerKV],
        num_tokens: int,
        device: torch.device,
        transforms: Sequence[KVTransforms] | None = None,
    ) -> None:
        """transforms: of `PagedStore`."""
        self.model, self.device = model, device
        self.layout = KVLayout.of(tuple(layers), BLOCK_SIZE, order=KVOrder.of(device.type != "cpu"))
        self.num_pages = -(-num_tokens // BLOCK_SIZE)
        pools = [allocate_pool(self.num_pages, group.spec.block_bytes, device) for group in self.layout.groups]
        self.attention: AttentionBackend = PagedAttention(PagedStore(pools, self.layout, transforms), self.layout)

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int], first_position: int = 0, chunk: int | None = None) -> torch.Tensor:
        """What the head reads, [tokens, hidden], of a sequence that takes the place of an earlier one.

        first_position: of its first token, which sees nothing before it all the same; chunk: tokens computed at once,
        all of them if not given.
        """
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        parts = []
        for start in range(0, len(ids), chunk or len(ids)):
            some = ids[start : start + (chunk or len(ids))]
            parts.append(self.model.hidden(self._batch(some, start, first_position), self.attention))
        return torch.cat(parts)

    def _batch(self, ids: torch.Tensor, start: int, first_position: int) -> ForwardBatch:
        count, groups = len(ids), len(self.layout.groups)
        rows = torch.arange(count, device=self.device)

        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        pages = torch.arange(self.num_pages, dtype=torch.int32, device=self.device)[None]
        return ForwardBatch(
            input_ids=ids,
            positions=rows + start + first_position,
            slot_mapping=(rows + start,) * groups,
            query_start=int32(0, count),
            seq_lens=int32(start + count),
            block_tables=(pages,) * groups,
            logit_rows=rows,
        )
