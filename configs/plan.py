"""What a model takes of memory and what fits into it, from its configuration alone: the answers of `octavo plan`.

    settings, model, memory ─> Question ─┐
                                         ├─> make_plan ─> Plan: costs, pools, and `Option`s beside each other
    Lengths of requests ─────────────────┘

Pools are sized by the engine's own function (`configs.pool`), so what is predicted here is what is allocated there.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from configs.errors import SettingsError
from configs.kv import LayerKV
from configs.kv_flags import kv_layers
from configs.model import DType, SizedConfig
from configs.plan_costs import paged_bytes, payload_bytes, reserved_bytes, useful_share
from configs.plan_lengths import Lengths
from configs.plan_model import query_heads
from configs.plan_options import Load, Option, Question, in_mib, options
from configs.pool import Costs, PoolPlan
from configs.settings import Settings, flag


@dataclass(frozen=True)
class LayerKind:
    """Layers that keep the same of a token."""

    num_layers: int
    query_heads: int
    layer: LayerKV
    block_size: int

    @property
    def attention(self) -> Literal["MHA", "GQA", "MQA"]:
        """Multi-head: each query head has a KV head of its own; multi-query: all share one; grouped-query: between."""
        if self.layer.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.layer.kv_heads == 1 else "GQA"

    @property
    def bytes_per_token(self) -> int:
        """Of all its layers."""
        return self.num_layers * self.layer.bytes_per_token()

    @property
    def bytes_per_block(self) -> int:
        """Without what fills a page up to a multiple of 4 KiB."""
        return self.block_size * self.bytes_per_token


@dataclass(frozen=True)
class Plan:
    question: Question
    kinds: tuple[LayerKind, ...]
    """Of the whole model."""
    rank_kinds: tuple[LayerKind, ...]
    """The same layers, as one GPU holds them."""
    whole: Costs
    """As if one GPU held all of it."""
    context: int
    """Tokens of the sequence that is asked for, or of the longest."""
    is_context_given: bool
    lengths: Lengths
    """As long as the window allows."""
    load: Load
    options: tuple[Option, ...]
    """Reservation first, then in pages as it is, then changes in the order of their price."""
    ranks_needed: int | None
    """GPUs of this size with which there is room for a KV cache, where there is none."""
    ranks_for_load: int | None
    """The same for the load, where it does not fit."""

    @property
    def costs(self) -> Costs:
        """Of one GPU."""
        return self.question.costs

    @property
    def pool(self) -> PoolPlan | None:
        """Of one GPU; None: the memory is not known, or see `refusal`."""
        return self.question.sized[0]

    @property
    def refusal(self) -> str:
        """Why octavo serve would not start; "" where it would."""
        return self.question.sized[1]

    @property
    def replication(self) -> float:
        """Times that KV heads are kept, on average: more than once where there are more GPUs than KV heads."""
        return self.question.ranks * self.costs.layout.bytes_per_token / self.whole.layout.bytes_per_token

    @property
    def context_bytes(self) -> int:
        """K and V of one sequence of `context` tokens, on one GPU."""
        return payload_bytes(self.costs.layout, self.context)

    @property
    def context_page_bytes(self) -> int:
        return paged_bytes(self.costs.layout, self.context)

    @property
    def useful_in_pages(self) -> float:
        """Share of the bytes in requests' pages that hold their tokens."""
        return useful_share(self.costs.layout, self.lengths.tokens)

    @property
    def useful_in_reservations(self) -> float:
        costs = self.costs
        held = reserved_bytes(costs.layout, costs.window, costs.step_tokens)
        return useful_share(costs.layout, self.lengths.tokens, held)

    @property
    def is_served(self) -> bool | None:
        """Whether a sequence of `context` tokens is served; None where the memory is not known."""
        if self.question.memory is None:
            return None
        return self.pool is not None and self.pool.max_model_len >= self.context

    @property
    def in_pages(self) -> Option:
        """How octavo serve would hold the load, with nothing changed."""
        return next(option for option in self.options if option.kind == "paging")

    @property
    def told_on_a_cpu(self) -> str | None:
        """The flag that gives the load its pools where a CPU has the memory: of itself a CPU gives them a part only.
        None on a GPU, where a flag decides already, and where no pools hold the load."""
        question, size = self.question, self.in_pages.pool_bytes
        if size is None or question.memory is None or question.memory.is_gpu or question.is_sized_by_a_flag:
            return None
        return f"{flag('kv_cache_memory_bytes')} {in_mib(size)}"

    @property
    def advised(self) -> Option | None:
        """The first that holds the load, with this model if that can be; None where none does, or the memory is not
        known."""
        fitting = [option for option in self.options if option.fits and option.kind != "reservation"]
        return min(fitting, key=lambda option: option.kind == "heads", default=None)


def make_plan(question: Question, lengths: Lengths, context: int | None = None) -> Plan:
    """`context`: tokens of one sequence; None: the window.

    That something does not fit is no error: the plan says so. Raises `StartupError` for settings and sizes that cannot
    be, one sentence that names flag, value and limit.
    """
    settings, window = question.settings, question.costs.window
    if context is not None and context < 1:
        raise SettingsError(f"--context {context} is no length of a sequence: give at least 1.")
    if context is not None and context > window:
        raise SettingsError(
            f"--context {context} is not within the window of {window} tokens: lower it, or give --max-model-len "
            f"(this model takes up to {question.model.max_window})."
        )
    shown = lengths.within(window)
    load = Load(settings.max_num_seqs, shown.p95 if context is None else context)
    return Plan(
        question=question,
        kinds=layer_kinds(settings, question.model, question.dtype),
        rank_kinds=layer_kinds(settings, question.rank, question.dtype),
        whole=question.costs_of(question.model),
        context=window if context is None else context,
        is_context_given=context is not None,
        lengths=shown,
        load=load,
        options=tuple(options(question, shown, load)),
        ranks_needed=question.ranks_needed(lambda split: split.sized[0] is not None),
        ranks_for_load=question.ranks_needed(lambda split: bool(split.holds(load))),
    )


def layer_kinds(settings: Settings, model: SizedConfig, dtype: DType) -> tuple[LayerKind, ...]:
    counts = Counter(zip(query_heads(model), kv_layers(settings, model, dtype), strict=True))
    return tuple(LayerKind(count, heads, layer, settings.block_size) for (heads, layer), count in counts.items())
