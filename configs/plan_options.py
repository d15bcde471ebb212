"""Ways to hold a load of requests, each with its number: reservation in one piece beside pages; then, from the cheapest
to the dearest, more of the memory that is there, fewer requests at once, fewer KV heads (another model) and
quantisation, of the cache and of the weights."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from configs.errors import SettingsError, StartupError
from configs.model import DType, SizedConfig
from configs.plan_costs import memory_for, pages_for, pool_for, reserved_bytes
from configs.plan_lengths import Lengths
from configs.plan_model import even_splits, kv_heads, query_heads, rank_of, with_kv_heads
from configs.pool import GPU_SHARE, Costs, Memory, PoolPlan, size_pools
from configs.settings import Settings, flag

AUTO_DTYPE: DType = "bfloat16"
"""--dtype auto, where no device is asked."""
FOR_GPUS = ("float16", "triton", "flash-attn")
"""Values of --dtype and --attention-backend."""
USUAL_KV_HEADS = 8
"""Of models with grouped-query attention."""
QUANTISED = (("int8", "auto"), ("int8", "int4"), ("int4", "auto"))
"""--kv-cache-dtype and --kv-cache-dtype-v from dear to cheap; fp8 takes as much as int8."""
MAX_PERCENT = 95
"""The highest --gpu-memory-utilization that is advised, in hundredths: what a step takes is an estimate."""
MAX_RANKS = 64
MIB = 2**20

Kind = Literal["reservation", "paging", "memory", "requests", "heads", "format", "weights"]


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
    weight_bytes: int
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
    """A model under settings, in a memory. Raises `SettingsError` for flags that are for the other kind of memory."""

    settings: Settings
    model: SizedConfig
    """The whole of it."""
    memory: Memory | None = None
    """Of each GPU, or of a CPU; None: nothing is asked of what fits."""
    ranks: int = 1
    """GPUs among which the model is split."""

    def __post_init__(self) -> None:
        given, backend = self.settings, self.settings.attention_backend
        if self.memory is None:
            return
        if self.memory.is_gpu and backend == "cpu":
            raise SettingsError(
                "--attention-backend cpu is for CPUs: give --memory in place of --gpu, or another --attention-backend."
            )
        if self.memory.is_gpu and given.batch_invariant and backend not in ("auto", "triton"):
            raise SettingsError(
                f"--batch-invariant asks that Triton computes attention: leave --attention-backend {backend} away."
            )
        for name in () if self.memory.is_gpu else ("dtype", "attention_backend"):
            if (value := getattr(given, name)) in FOR_GPUS:
                raise SettingsError(
                    f"{flag(name)} {value} is for GPUs: give --gpu in place of --memory, or another {flag(name)}."
                )

    @cached_property
    def dtype(self) -> DType:
        given = self.settings.dtype
        return AUTO_DTYPE if given == "auto" else given

    @cached_property
    def rank(self) -> SizedConfig:
        """What one GPU holds."""
        return rank_of(self.model, self.ranks)

    @cached_property
    def kind(self) -> Memory:
        """The memory that is meant. Where none is given a GPU's, except for a file whose codes only a CPU keeps. (What
        is available is then 0.)"""
        if self.memory is not None:
            return self.memory
        stored = self.model.weight_format(self.settings.quantization, is_gpu=False) == "stored"
        if self.ranks > 1 or not stored or self.settings.dtype == "float16":
            return Memory(0, is_gpu=True)
        return Memory(0, is_gpu=False, is_before_start=True)

    def costs_of(self, model: SizedConfig) -> Costs:
        """Better than plain torch serves on a GPU, unless that is asked for."""
        gathers = self.settings.attention_backend == "reference"
        return Costs.of(self.settings, model, self.dtype, self.kind.is_gpu, gathers)

    @cached_property
    def costs(self) -> Costs:
        """Of one GPU."""
        return self.costs_of(self.rank)

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

    @property
    def is_sized_by_a_flag(self) -> bool:
        given = self.settings
        sizes = given.num_gpu_blocks_override, given.kv_cache_memory_bytes, given.gpu_memory_utilization
        return any(size is not None for size in sizes)

    def ranks_needed(self, is_enough: Callable[["Question"], bool]) -> int | None:
        """GPUs of this size among which to split the model. None where it need not or cannot be."""
        if self.memory is None or not self.memory.is_gpu or is_enough(self):
            return None
        counts = (count for count in even_splits(self.model) if self.ranks < count <= MAX_RANKS)
        return next((count for count in counts if is_enough(replace(self, ranks=count))), None)


def options(question: Question, lengths: Lengths, load: Load) -> Iterator[Option]:
    """Reservation first, for comparison; then what applies, in the order of its price."""
    yield _reserved(question, load)
    paged = _option(question, lengths, load, "paging", "in pages, as it is")
    yield paged
    if not paged.fits and paged.pool_bytes is not None and (more := _more_memory(question, load, paged.pool_bytes)):
        yield _option(more[0], lengths, load, "memory", more[1])
    if fewer := _fewer_requests(question, lengths, load):
        yield fewer
    now = max(kv_heads(question.model))
    for count in _fewer_heads(question, load, now):
        other = replace(question, model=with_kv_heads(question.model, count))
        yield _option(other, lengths, load, "heads", f"another model: {count} of {now} KV heads")
    seen = {paged.bytes_per_token}
    for kind, other, words in _quantised(question):
        try:
            option = _option(other, lengths, load, kind, words)
        except StartupError:  # heads that cannot be cut into groups for four bits, weights that are not ours to pack
            continue
        if kind == "weights":
            is_less = option.weight_bytes < paged.weight_bytes
        else:
            is_less = option.bytes_per_token < paged.bytes_per_token and option.bytes_per_token not in seen
            seen.add(option.bytes_per_token)
        if is_less:
            yield option


def _more_memory(question: Question, load: Load, size: int) -> tuple[Question, str] | None:
    """With pools of `size` bytes or little more, by the flag that decides, and its words; None where the memory is not
    there."""
    for name, word, value in _levers(question, size):
        other = replace(question, settings=question.settings.model_copy(update={name: value}))
        if other.holds(load):
            return other, f"{flag(name)} {word}"
    return None


def _levers(question: Question, size: int) -> Iterator[tuple[str, str, int | float]]:
    """(setting, value as it is written, value) in the order in which they stand above each other, see
    `resolve_num_blocks`."""
    settings = question.settings
    share = settings.gpu_memory_utilization
    if share is None and question.memory is not None and question.memory.is_gpu:
        share = GPU_SHARE
    if settings.num_gpu_blocks_override is not None:
        pages = pages_for(settings, question.costs, size)
        yield "num_gpu_blocks_override", str(pages), pages
    elif settings.kv_cache_memory_bytes is not None or share is None:
        yield "kv_cache_memory_bytes", in_mib(size), math.ceil(size / MIB) * MIB
        yield "kv_cache_memory_bytes", str(size), size  # where memory ends before the next whole MiB
    else:
        for percent in range(int(100 * share) + 1, MAX_PERCENT + 1):
            yield "gpu_memory_utilization", f"{percent / 100:g}", percent / 100


def in_mib(size: int) -> str:
    """As a flag takes it, rounded up."""
    return f"{math.ceil(size / MIB)}MiB"


def _fewer_requests(question: Question, lengths: Lengths, load: Load) -> Option | None:
    """Pages of layers with windows are kept for --max-num-seqs sequences, whose number then leaves the other layers
    less: the lower one with which most of the load's requests run at once, where that is more than now."""
    now = question.fitting(load.tokens)
    if now is None or now >= load.count or all(group.window is None for group in question.costs.layout.groups):
        return None

    def with_most(count: int) -> Question:
        return replace(question, settings=question.settings.model_copy(update={"max_num_seqs": count}))

    low, high = now, load.count  # so many run at once with themselves as the limit; so many do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if with_most(middle).holds(Load(middle, load.tokens)) else (low, middle)
    if low == now:
        return None
    option = _option(with_most(low), lengths, load, "requests", f"{flag('max_num_seqs')} {low}")
    return replace(
        option,
        at_p50=low,
        at_p95=min(low, option.at_p95 or 0),
        at_load=low,
        pool_bytes=None,
        memory_bytes=None,
        fits=False,
    )


def _quantised(question: Question) -> Iterator[tuple[Kind, Question, str]]:
    """The cache and the weights, each alone. Weights in int8 change answers more than the cache in int8 does, and less
    than the cache in four bits. On a CPU they are faster too; on a GPU slower, so they come last there."""
    changes: list[tuple[Kind, Question, str]] = [("format", *each) for each in _caches(question)]
    weights = replace(question, settings=question.settings.model_copy(update={"quantization": "int8"}))
    is_fast = not question.kind.is_gpu
    changes.insert(1 if is_fast else len(changes), ("weights", weights, f"{flag('quantization')} int8"))
    yield from changes


def _caches(question: Question) -> Iterator[tuple[Question, str]]:
    """With K and V in other formats, and the flags to change for that; then with layers with windows in them too, which
    of themselves keep the model's own."""
    given = question.settings
    for k_format, v_format in QUANTISED:
        yield _with_formats(question, kv_cache_dtype=k_format, kv_cache_dtype_v=v_format)
    if not given.kv_cache_dtype_skip_layers:
        for k_format, v_format in ((given.kv_cache_dtype, given.kv_cache_dtype_v), *QUANTISED):
            formats = {"kv_cache_dtype": k_format, "kv_cache_dtype_v": v_format}
            yield _with_formats(question, **formats, kv_cache_dtype_skip_layers=("none",))


def _with_formats(question: Question, **changed: Any) -> tuple[Question, str]:
    given = question.settings
    changed = {name: value for name, value in changed.items() if getattr(given, name) != value}
    values = {name: " ".join(value) if isinstance(value, tuple) else value for name, value in changed.items()}
    words = [f"{flag(name)} {value}" for name, value in values.items()]
    if given.kv_cache_scales is not None and {"kv_cache_dtype", "kv_cache_dtype_v"} & changed.keys():
        changed["kv_cache_scales"] = None  # they are for other formats
        words.append("without --kv-cache-scales")
    return replace(question, settings=given.model_copy(update=changed)), " ".join(words)


def _fewer_heads(question: Question, load: Load, now: int) -> list[int]:
    """What is usual, the most that hold the load, and one for each GPU, as far as a GPU then keeps fewer than now."""
    heads, ranks = max(query_heads(question.model)), question.ranks
    fewer = [count for count in range(now - 1, 0, -1) if heads % count == 0 and -(-count // ranks) < -(-now // ranks)]
    fewer = [count for count in fewer if ranks in even_splits(with_kv_heads(question.model, count))]
    holding = (n for n in fewer if replace(question, model=with_kv_heads(question.model, n)).holds(load))
    one_each = (n for n in fewer if n <= ranks)
    chosen = {USUAL_KV_HEADS, next(holding, None), next(one_each, None)}
    return [count for count in fewer if count in chosen]


def _option(question: Question, lengths: Lengths, load: Load, kind: Kind, words: str) -> Option:
    costs = question.costs
    pool_bytes = pool_for(question.settings, costs, load.count, load.tokens)
    return Option(
        kind=kind,
        words=words,
        bytes_per_token=costs.layout.bytes_per_token,
        weight_bytes=costs.weight_bytes,
        at_p50=question.fitting(lengths.p50),
        at_p95=question.fitting(lengths.p95),
        at_load=question.fitting(load.tokens),
        pool_bytes=pool_bytes,
        memory_bytes=None if pool_bytes is None else memory_for(question.settings, costs, pool_bytes, question.kind),
        fits=question.holds(load),
    )


def _reserved(question: Question, load: Load) -> Option:
    """Each request its maximum: their number does not depend on what they come to."""
    settings, costs, (pool, _) = question.settings, question.costs, question.sized
    each = reserved_bytes(costs.layout, costs.window, costs.step_tokens)
    count = None if question.memory is None else 0 if pool is None else pool.pool_bytes // each
    return Option(
        kind="reservation",
        words=f"in one piece, {costs.window:,} tokens each",
        bytes_per_token=costs.layout.bytes_per_token,
        weight_bytes=costs.weight_bytes,
        at_p50=count,
        at_p95=count,
        at_load=count,
        pool_bytes=load.count * each,
        memory_bytes=memory_for(settings, costs, load.count * each, question.kind),
        fits=None if count is None else count >= load.count,
    )
