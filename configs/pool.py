"""How many KV pages there are, and how long a sequence can therefore get. Pure arithmetic.

Group 0 keeps whole contexts: the more pages, the more and the longer sequences. A windowed group needs no more than

    2 x (--max-num-seqs x (pages of a window + 2) + pages of --max-num-batched-tokens)

what all sequences together can hold, and as much again for cached prefixes; nor more than group 0, whose blocks name
its pages. So bytes are shared out page by page until the windowed groups have enough; the rest is group 0's. Where all
layers have windows the group with the largest takes its place (--num-gpu-blocks-override then counts its pages), and
group 0's blocks, without bytes, are as many as give the sequences that fit their whole length.

On a GPU a step's own memory is set aside first (`step_bytes`), and without any flag the pools take a stated share of
what is free: nobody else wants it.

    settings, model, dtype ─> Costs ─┐
                                     ├─> size_pools ─> PoolPlan
    Memory ──────────────────────────┘

The engine and `octavo plan` both go this way.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from configs.errors import SettingsError, StartupError
from configs.graphs import decode_sizes
from configs.kv import KVLayout, KVOrder, WindowPages
from configs.kv_flags import PLAIN, kv_layers
from configs.model import DType, SizedConfig, WeightFormat
from configs.refresh import scratch_bytes
from configs.setting_types import write_size
from configs.settings import Settings

AUTO_SHARE = 0.5
"""Without any flag: the part of the memory left by the weights that the pools may take."""
AUTO_BYTES = 4 * 1024**3
"""Without any flag: the largest pools, so that a laptop stays usable."""
MAX_NAMES = 2**17
"""Blocks without bytes, beyond what the groups with bytes and one sequence need."""
GPU_SHARE = 0.9
"""Without any flag, on a GPU: the part of the free memory that weights, a step's work and the pools may take."""
MAX_PAGES, MAX_GPU_PAGES = 2**18, 2**20
"""Without any flag: the most pages. Main memory keeps books of each; only a toy's pages are so small."""
SCORES_BYTES = 4 * 2**26
"""Attention scores in fp32 and what is made of them at a time (`kernels.reference.attention.SCORES`)."""
STATES_BYTES = 4 * 2**25
"""Partial results of decoding (`kernels.triton.attention.STATES`). Steps without a graph have them in SCORES_BYTES."""
LIBRARY_BYTES = 2**28
"""Work space of a GPU's libraries, and what its allocator cannot use for being in pieces."""
GRAPH_BYTES = 2**23
"""What a GPU's driver keeps of one CUDA graph: some hundred kernels and their arguments. Reckoned, not measured."""

PROCESS_BYTES, TOKEN_BYTES = 9 * 2**25, 2**11
"""What Octavo's two processes take on a CPU beside weights and pools, a small step's work among it: something, and for
each entry of the vocabulary, whose text and merges are in two tokenizers. 367 MiB were measured with SmolLM2 (49,152
entries), 556 with Qwen2.5 (151,936)."""
STEP, REFRESH, PROCESSES = "a step", "a refresh", "Octavo itself"
"""What memory is set aside for, in words."""


@dataclass(frozen=True)
class Memory:
    """What there is for weights, a step's work and the pools."""

    available_bytes: int
    """Free before the weights are loaded."""
    is_gpu: bool
    is_before_start: bool = False
    """Octavo's processes will take some of it; on a CPU that is set aside."""


@dataclass(frozen=True)
class StepBytes:
    """Memory that the largest step takes beside weights and pools: an estimate from above."""

    logits: int
    """Of every sequence: in fp32, and before that in the model's format, which is as wide at most."""
    activations: int
    """Of every token, as 16 fp32 numbers for each row of a square matrix with as many numbers as a layer (the widest
    things in a layer are a few times that wide)."""
    context: int
    """One sequence's whole context, K and V, gathered and widened: 12 bytes a number. 0 where attention reads pages."""
    graphs: int
    """What CUDA graphs keep: all that a step of the largest one takes, and themselves; 0 without them."""
    scores: int = SCORES_BYTES
    libraries: int = LIBRARY_BYTES

    @property
    def total(self) -> int:
        return self.logits + self.activations + self.context + self.graphs + self.scores + self.libraries


@dataclass(frozen=True)
class Costs:
    """What a model takes of memory under given settings, whatever the memory."""

    layout: KVLayout
    window: int
    """Tokens of context that the model and --max-model-len allow."""
    weight_bytes: int
    """Weights, tables of positions, and what keys are fitted by."""
    step: StepBytes
    """Set aside on a GPU. On a CPU it comes out of what the pools leave."""
    refresh_bytes: int
    """The full-precision copy of one sequence that --kv-refresh-interval works in; 0 without it."""
    quantization: WeightFormat
    """What weights of linear layers are kept in."""
    int8_bytes: int | None
    """`weight_bytes` with --quantization int8, where that is fewer."""
    process_bytes: int
    """Of Octavo's processes on a CPU, a step's work among it."""
    step_tokens: int
    """Of the largest step."""

    @classmethod
    def of(
        cls, settings: Settings, model: SizedConfig, dtype: DType, is_gpu: bool = False, gathers: bool = False
    ) -> "Costs":
        """dtype: what the model computes in (--dtype, resolved); gathers: attention does, which is plain torch's way on
        a GPU. Raises `StartupError` for a setting that the model cannot have."""
        window = model.effective_window(settings.max_model_len)
        layers = kv_layers(settings, model, dtype)
        layout = KVLayout.of(layers, settings.block_size, window, KVOrder.of(is_gpu))
        sizes = {"vocab_size": model.vocab_size, "num_parameters": model.num_parameters}
        step = step_bytes(settings, layout, window=window if gathers else 0, **sizes)
        quantization = model.weight_format(settings.quantization, is_gpu)
        others = model.table_bytes(window) + sum(layer.fit_bytes for layer in layers)
        weights = model.weight_bytes(dtype, quantization) + others
        refresh = 0
        if settings.kv_refresh_interval is not None:
            refresh = scratch_bytes(layout, PLAIN[dtype], window)
        processes = PROCESS_BYTES + model.vocab_size * TOKEN_BYTES
        int8 = _int8_bytes(model, dtype, others)
        lighter = int8 if int8 is not None and int8 < weights else None
        tokens = settings.step_tokens(is_gpu)
        return cls(layout, window, weights, step, refresh, quantization, lighter, processes, tokens)

    def work(self, memory: Memory) -> dict[str, int]:
        """Bytes that are set aside beside weights and pools, and what for."""
        sizes = {
            STEP: self.step.total if memory.is_gpu else 0,
            REFRESH: self.refresh_bytes,
            PROCESSES: self.process_bytes if memory.is_before_start and not memory.is_gpu else 0,
        }
        return {name: size for name, size in sizes.items() if size}


def _int8_bytes(model: SizedConfig, dtype: DType, others: int) -> int | None:
    """Weights in int8 and `others`; None where the model cannot have them."""
    try:
        return model.weight_bytes(dtype, "int8") + others
    except StartupError:
        return None


def weights_in_words(costs: Costs, dtype: DType) -> str:
    size = write_size(costs.weight_bytes)
    if costs.quantization == "none":
        return f"{size} in {dtype}"
    kept = "as the file has them" if costs.quantization == "stored" else f"in {costs.quantization}"
    return f"{size}: linear layers {kept}, all else in {dtype}"


@dataclass(frozen=True)
class PoolPlan:
    """The pools to allocate and the window that follows from them."""

    num_pages: tuple[int, ...]
    """Of each KV group; see `KVLayout`."""
    windows: tuple[WindowPages, ...]
    """The windowed groups, for the KV manager."""
    block_size: int
    num_tokens: int
    """The longest sequence that the pools can hold."""
    pool_bytes: int
    max_model_len: int
    """Effective window: min(model, --max-model-len, pools)."""
    decided_by: str
    """What fixed the size, in words: a flag, or the default and its reason."""
    lever: str
    """The flag that changes it."""
    notes: tuple[str, ...]
    """Sentences to warn with: that the pool is smaller than the window asked for, and which flag to change."""

    @property
    def num_blocks(self) -> int:
        return self.num_pages[0]

    def sequences(self, tokens: int) -> float:
        """Sequences of so many tokens, prompt and output, whose pages fit at once.

        A windowed group holds the window's pages of each and two more, and once the pages of a step. Where it is too
        small for that, each sequence is granted all that it may hold at once.
        """
        pages = -(-tokens // self.block_size)
        fits = [self.num_pages[0] / pages]
        for window in self.windows:
            steady = -(-window.window // self.block_size) + 2
            together = (window.num_pages - (window.max_held - steady)) / min(steady, pages)
            fits.append(max(together, window.num_pages / min(window.max_held, pages)))
        return min(fits)

    @property
    def full_sequences(self) -> float:
        """To a tenth, which is never more than there is room for."""
        return math.floor(10 * self.sequences(self.max_model_len)) / 10


def size_pools(settings: Settings, costs: Costs, memory: Memory) -> PoolPlan:
    """`resolve_num_blocks` with a device's rules. Raises `SettingsError` as that does, and for pools in which no
    sequence gets as long as --kv-refresh-interval; where weights in int8 alone would help, it says so too."""
    try:
        return _sized(settings, costs, memory)
    except SettingsError as error:
        raise SettingsError(str(error).removesuffix(".") + _int8_instead(settings, costs, memory)) from None


def _int8_instead(settings: Settings, costs: Costs, memory: Memory) -> str:
    """The end of a refusal's sentence."""
    if costs.int8_bytes is None:
        return "."
    try:
        _sized(settings, replace(costs, weight_bytes=costs.int8_bytes), memory)
    except SettingsError:
        return "."
    sizes = f"{write_size(costs.int8_bytes)} of weights in place of {write_size(costs.weight_bytes)}"
    slower = ", in slower steps" if memory.is_gpu else ""
    return f"; or give --quantization int8, with which it fits ({sizes}{slower})."


def _sized(settings: Settings, costs: Costs, memory: Memory) -> PoolPlan:
    plan = resolve_num_blocks(
        settings,
        costs.layout,
        window=costs.window,
        available_bytes=memory.available_bytes,
        weight_bytes=costs.weight_bytes,
        work=costs.work(memory),
        is_gpu=memory.is_gpu,
    )
    interval = settings.kv_refresh_interval
    if interval is not None and interval >= plan.max_model_len:
        raise SettingsError(
            f"--kv-refresh-interval {interval} never comes, since the KV cache ({plan.decided_by}) holds sequences of "
            f"{plan.max_model_len} tokens, and none generates more than {plan.max_model_len - 1}: lower it, or raise "
            f"{plan.lever}."
        )
    return plan


def step_bytes(settings: Settings, layout: KVLayout, *, window: int, vocab_size: int, num_parameters: int) -> StepBytes:
    """Of a GPU. window: tokens of context that are gathered."""
    tokens, sizes = settings.step_tokens(is_gpu=True), decode_sizes(settings.max_num_seqs)
    activation = 64 * math.isqrt(num_parameters // max(1, layout.num_layers))
    widest = max((layer.kv_heads * layer.head_dim for group in layout.groups for layer in group.spec.layers), default=0)
    graphs = sizes[-1] * (vocab_size * 8 + activation) + STATES_BYTES + len(sizes) * GRAPH_BYTES
    return StepBytes(
        logits=settings.max_num_seqs * vocab_size * 8,
        activations=tokens * activation,
        context=2 * window * widest * 12,
        graphs=0 if settings.enforce_eager else graphs,
    )


def resolve_num_blocks(
    settings: Settings,
    layout: KVLayout,
    *,
    window: int,
    available_bytes: int,
    weight_bytes: int,
    work: Mapping[str, int] = MappingProxyType({}),
    is_gpu: bool = False,
) -> PoolPlan:
    """Sizes the KV pools: --num-gpu-blocks-override, else --kv-cache-memory-bytes, else --gpu-memory-utilization, else
    the default: GPU_SHARE in place of the last, or a part of main memory.

    `window`: tokens that the model and --max-model-len allow (`SizedConfig.effective_window`); `available_bytes`:
    memory that was free before the weights were loaded; `weight_bytes`: what they take of it; `work`: see `Costs.work`.
    Pools smaller than the window lower the window, with a note. Raises `SettingsError`, which names the flag to
    change, if the weights do not fit, if a stated size does not fit, or if there is no room for a single page.
    """
    taken = weight_bytes + sum(work.values())
    taker = _listed(["the weights", *(f"the {write_size(size)} of {name}" for name, size in work.items())])
    room = available_bytes - taken
    if room < layout.block_bytes:
        raise SettingsError(
            f"--model: {taker} take {write_size(taken)} of the {write_size(available_bytes)} of memory that are "
            f"available, which leaves no room for a KV cache: {_cure(work)}."
        )
    takers = _listed(["the weights", *work])
    step = settings.step_tokens(is_gpu)
    sizes = _Sizes(settings, layout, window, step)
    num_pages, lever, reason = _choose(settings, sizes, available_bytes, taken, takers, GPU_SHARE if is_gpu else None)
    size = _bytes(layout, num_pages)
    if min(num_pages) < 1:
        raise SettingsError(f"{reason} is less than one KV page ({write_size(layout.block_bytes)}): raise {lever}.")
    if size > room:
        raise SettingsError(
            f"{reason} asks for a KV cache of {write_size(size)}, but {taker} leave {write_size(room)} of memory: "
            f"lower {lever}."
        )
    block_size = layout.block_size
    windows = tuple(
        WindowPages.plan(group.window, count, block_size, step)
        for group, count in zip(layout.groups, num_pages, strict=True)
        if group.window is not None
    )
    whole = num_pages[0] * block_size
    limits = [limit for pages in windows if (limit := pages.usable_tokens(block_size)) is not None]
    num_tokens = min([whole, *limits])
    max_model_len = min(window, num_tokens)
    notes = [_note(settings, num_tokens, window, lever, num_tokens < whole)] if num_tokens < window else []
    return PoolPlan(num_pages, windows, block_size, num_tokens, size, max_model_len, reason, lever, tuple(notes))


def _listed(words: Sequence[str]) -> str:
    """'a, b and c'"""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _cure(work: Mapping[str, int]) -> str:
    """Of a memory without room for a single page."""
    cure = "free memory or give a smaller --model"
    if STEP in work:
        cure += ", --max-model-len, --max-num-seqs or --max-num-batched-tokens"
    elif REFRESH in work:
        cure += " or --max-model-len"
    return f"{cure}, or leave out --kv-refresh-interval" if REFRESH in work else cure


def _note(settings: Settings, num_tokens: int, window: int, lever: str, windows_limit: bool) -> str:
    origin = "the model" if settings.max_model_len is None else "--max-model-len"
    other = " or lower --max-num-batched-tokens" if windows_limit else ""
    return (
        f"The KV cache holds {num_tokens} tokens, less than the {window} that {origin} asks for: sequences are "
        f"limited to {num_tokens} tokens. Raise {lever}{other} for longer ones."
    )


class _Sizes:
    """Page counts of all groups from one number."""

    def __init__(self, settings: Settings, layout: KVLayout, max_model_len: int, step_tokens: int) -> None:
        self.layout = layout
        self.max_model_len = max_model_len
        self.whole_length = -(-max_model_len // layout.block_size)
        """Pages of the longest sequence."""
        step = -(-step_tokens // layout.block_size)
        self._enough = [
            2 * (settings.max_num_seqs * (self._window_pages(number) + 2) + step) if group.window is not None else 0
            for number, group in enumerate(layout.groups)
        ]
        self._base = 0 if layout.groups[0].layers else len(layout.groups) - 1
        """The group that takes what the others do not need."""
        self.all_sequences = settings.max_num_seqs * self.whole_length
        if self._base:
            self.all_sequences = min(self.all_sequences, self._enough[self._base])

    def for_blocks(self, count: int) -> tuple[int, ...]:
        """`count` pages for the base group, as many or enough for the others."""
        pages = [min(count, enough) for enough in self._enough]
        pages[self._base] = count
        if self._base:
            names = min(count * self.whole_length // self._window_pages(self._base), MAX_NAMES)
            pages[0] = max(count, self.whole_length, names) if count else 0
        else:
            pages[0] = count
        return tuple(pages)

    def for_bytes(self, size: int) -> tuple[int, ...]:
        """The most pages that take no more than `size` bytes."""
        costs = [group.spec.block_bytes for group in self.layout.groups]
        per_page, count = sum(costs), size // sum(costs)
        others = [number for number in range(1, len(costs)) if number != self._base]
        for number in sorted(others, key=self._enough.__getitem__):
            if count <= self._enough[number]:
                break
            size, per_page = size - self._enough[number] * costs[number], per_page - costs[number]
            count = size // per_page
        return self.for_blocks(count)

    def _window_pages(self, number: int) -> int:
        window = self.layout.groups[number].window
        assert window is not None
        return -(-window // self.layout.block_size)


def _choose(
    settings: Settings, sizes: _Sizes, available_bytes: int, taken: int, takers: str, default_share: float | None
) -> tuple[tuple[int, ...], str, str]:
    """(pages of each group, the flag to change if that is wrong, what decided in words). takers: of what is taken."""
    if settings.num_gpu_blocks_override is not None:
        blocks = settings.num_gpu_blocks_override
        return sizes.for_blocks(blocks), "--num-gpu-blocks-override", f"--num-gpu-blocks-override {blocks}"
    if settings.kv_cache_memory_bytes is not None:
        size = settings.kv_cache_memory_bytes
        return sizes.for_bytes(size), "--kv-cache-memory-bytes", f"--kv-cache-memory-bytes {write_size(size)}"
    share = settings.gpu_memory_utilization or default_share
    if share is not None:
        left = max(0, int(available_bytes * share) - taken)
        num_pages = sizes.for_bytes(left)
        if settings.gpu_memory_utilization is None and max(num_pages) > MAX_GPU_PAGES:
            pages = f"the default limit of {MAX_GPU_PAGES} pages"
            return sizes.for_blocks(MAX_GPU_PAGES), "--num-gpu-blocks-override", pages
        if settings.gpu_memory_utilization is None:
            reason = f"by default {share:g} of the GPU's free memory ({write_size(left)} beside {takers})"
        else:
            reason = f"--gpu-memory-utilization {share:g} ({write_size(left)} beside {takers})"
        return num_pages, "--gpu-memory-utilization", reason
    half = int((available_bytes - taken) * AUTO_SHARE)
    options = [
        (sizes.for_blocks(MAX_PAGES), f"the default limit of {MAX_PAGES} pages"),
        (sizes.for_blocks(sizes.all_sequences), f"--max-num-seqs {settings.max_num_seqs} full windows"),
        (sizes.for_bytes(AUTO_BYTES), f"the default limit of {write_size(AUTO_BYTES)}"),
        (sizes.for_bytes(half), f"half of the memory that {takers} leave ({write_size(half)})"),
    ]
    num_pages, reason = min(options, key=lambda option: _bytes(sizes.layout, option[0]))
    return num_pages, "--kv-cache-memory-bytes", reason


def _bytes(layout: KVLayout, num_pages: tuple[int, ...]) -> int:
    return sum(count * group.spec.block_bytes for count, group in zip(num_pages, layout.groups, strict=True))
