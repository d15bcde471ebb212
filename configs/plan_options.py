"""Ways to hold a load of requests, each with its number: reservation in one piece beside pages; then, from the cheapest
to the dearest, fewer KV heads (another model) and quantisation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from configs.errors import SettingsError
from configs.kv_flags import kv_layers
from configs.model import DType, SizedConfig
from configs.plan_costs import memory_for, pool_for, reserved_bytes
from configs.plan_lengths import Lengths
from configs.plan_model import query_heads, rank_of, with_kv_heads
from configs.pool import Costs, Memory, PoolPlan, size_pools
from configs.settings import Settings

AUTO_DTYPE: DType = "bfloat16"
"""--dtype auto, where no device is asked."""
USUAL_KV_HEADS = 8
"""Of models with grouped-query attention."""
QUANTISED: tuple[Literal["int8", "int4"], ...] = ("int8", "int4")
"""--kv-cache-dtype from dear to cheap; fp8 takes as much as int8."""
MAX_RANKS = 64

Kind = Literal["reservation", "paging", "heads", "format"]


@dataclass(frozen=True)
class Load:
    """So many requests of so many tokens at once."""

    count: int
    tokens: int


@dataclass(frozen=True)
class Option:
    """A way to hold the load, and what comes of it."""

    kind: Kind
    words: str
    bytes_per_token: int
    """On one GPU."""
    at_p50: int | None
    """Requests of the median length that fit at once; None where the memory is not known."""
    at_p95: int | None
    at_load: int | None
    """Requests as long as the load's."""
    pool_bytes: int | None
    """Pools that hold the load; None where none do."""
    memory_bytes: int | None
    """Free memory that has room for such pools."""
    fits: bool | None
    """Whether the load fits; None where the memory is not known."""


@dataclass(frozen=True)
class Question:
    """A model under settings, in a memory."""

    settings: Settings
    model: SizedConfig
    """The whole of it."""
    memory: Memory | None = None
    """Of each GPU, or of a CPU; None: nothing is asked of what fits."""
    ranks: int = 1
    """GPUs among which the model is split."""

    @cached_property
    def dtype(self) -> DType:
        given = self.settings.dtype
        if given == "float16" and self.memory is not None and not self.memory.is_gpu:
            raise SettingsError("--dtype float16 is for GPUs: give --gpu in place of --memory, or another --dtype.")
        return AUTO_DTYPE if given == "auto" else given

    @cached_property
    def rank(self) -> SizedConfig:
        """What one GPU holds."""
        return rank_of(self.model, self.ranks)

    @cached_property
    def costs(self) -> Costs:
        """Of one GPU."""
        return Costs.of(self.settings, self.rank, self.dtype)

    @cached_property
    def sized(self) -> tuple[PoolPlan | None, str]:
        """The pools of one GPU, or why there can be none: the engine's own sentence."""
        if self.memory is None:
            return None, ""
        try:
            return size_pools(self.settings, self.costs, self.memory), ""
        except SettingsError as error:
            return None, str(error)

    def fitting(self, tokens: int) -> int | None:
        """Requests of so many tokens that fit at once; None where the memory is not known."""
        pool, _ = self.sized
        if pool is None:
            return None if self.memory is None else 0
        return int(pool.sequences(tokens))

    def holds(self, load: Load) -> bool | None:
        count = self.fitting(load.tokens)
        return None if count is None else count >= load.count

    def ranks_needed(self, is_enough: Callable[["Question"], bool]) -> int | None:
        """GPUs of this size, a power of two, among which to split the model. None where it need not or cannot be."""
        if self.memory is None or not self.memory.is_gpu or is_enough(self):
            return None
        most = min(MAX_RANKS, max(query_heads(self.model)))
        counts = (2**power for power in range(1, 1 + most.bit_length()) if self.ranks < 2**power <= most)
        return next((count for count in counts if is_enough(replace(self, ranks=count))), None)


def options(question: Question, lengths: Lengths, load: Load) -> Iterator[Option]:
    """Reservation first, for comparison; then what applies, in the order of its price."""
    yield _reserved(question, load)
    paged = _option(question, lengths, load, "paging", "in pages, as it is")
    yield paged
    now = max(layer.kv_heads for layer in kv_layers(question.settings, question.model, question.dtype))
    for count in _fewer_heads(question, load, now):
        other = replace(question, model=with_kv_heads(question.model, count))
        yield _option(other, lengths, load, "heads", f"another model: {count} of {now} KV heads")
    for name in QUANTISED:
        changed = {"kv_cache_dtype": name, "kv_cache_dtype_v": "auto", "kv_cache_scales": None}
        other = replace(question, settings=question.settings.model_copy(update=changed))
        try:
            option = _option(other, lengths, load, "format", f"--kv-cache-dtype {name}")
        except SettingsError:  # heads that cannot be cut into groups for four bits
            continue
        if option.bytes_per_token < paged.bytes_per_token:
            yield option


def _fewer_heads(question: Question, load: Load, now: int) -> list[int]:
    """What is usual, the most that hold the load, and one for each GPU, as far as a GPU then keeps fewer than now."""
    heads, ranks = max(query_heads(question.model)), question.ranks
    fewer = [count for count in range(now - 1, 0, -1) if heads % count == 0 and -(-count // ranks) < -(-now // ranks)]
    holding = (n for n in fewer if replace(question, model=with_kv_heads(question.model, n)).holds(load))
    one_each = (n for n in fewer if n <= ranks)
    chosen = {USUAL_KV_HEADS, next(holding, None), next(one_each, None)}
    return [count for count in fewer if count in chosen]


def _option(question: Question, lengths: Lengths, load: Load, kind: Kind, words: str) -> Option:
    costs, memory = question.costs, question.memory
    pool_bytes = pool_for(question.settings, costs, load.count, load.tokens)
    return Option(
        kind=kind,
        words=words,
        bytes_per_token=costs.layout.bytes_per_token,
        at_p50=question.fitting(lengths.p50),
        at_p95=question.fitting(lengths.p95),
        at_load=question.fitting(load.tokens),
        pool_bytes=pool_bytes,
        memory_bytes=None if pool_bytes is None else memory_for(question.settings, costs, pool_bytes, memory),
        fits=question.holds(load),
    )


def _reserved(question: Question, load: Load) -> Option:
    """Each request its maximum: their number does not depend on what they come to."""
    settings, costs, (pool, _) = question.settings, question.costs, question.sized
    each = reserved_bytes(costs.layout, costs.window, settings.max_num_batched_tokens)
    count = None if question.memory is None else 0 if pool is None else pool.pool_bytes // each
    return Option(
        kind="reservation",
        words=f"in one piece, {costs.window:,} tokens each",
        bytes_per_token=costs.layout.bytes_per_token,
        at_p50=count,
        at_p95=count,
        at_load=count,
        pool_bytes=load.count * each,
        memory_bytes=memory_for(settings, costs, load.count * each, question.memory),
        fits=None if count is None else count >= load.count,
    )
