"""How many KV blocks there are, and how long a sequence can therefore get. Pure arithmetic."""

from dataclasses import dataclass

from configs.errors import SettingsError
from configs.kv import KVSpec
from configs.settings import Settings

AUTO_SHARE = 0.5
"""Without any flag: the part of the memory left by the weights that the pool may take."""
AUTO_BYTES = 4 * 1024**3
"""Without any flag: the largest pool, so that a laptop stays usable."""


@dataclass(frozen=True)
class PoolPlan:
    """The pool to allocate and the window that follows from it."""

    num_blocks: int
    num_tokens: int
    pool_bytes: int
    max_model_len: int
    """Effective window: min(model, --max-model-len, pool)."""
    decided_by: str
    """What fixed the size, in words: a flag, or the default and its reason."""
    notes: tuple[str, ...]
    """Sentences to warn with: that the pool is smaller than the window asked for, and which flag to change."""


def resolve_num_blocks(
    settings: Settings, spec: KVSpec, *, window: int, available_bytes: int, weight_bytes: int
) -> PoolPlan:
    """Sizes the KV pool: --num-gpu-blocks-override, else --kv-cache-memory-bytes, else --gpu-memory-utilization, else
    the default.

    `window`: tokens that the model and --max-model-len allow (`ModelConfig.effective_window`); `available_bytes`:
    memory that was free before the weights were loaded; `weight_bytes`: what they take of it.
    A pool smaller than the window lowers the window, with a note. Raises `SettingsError`, which names the flag to
    change, if the weights do not fit, if a stated size does not fit, or if there is no room for a single block.
    """
    room = available_bytes - weight_bytes
    if room < spec.block_bytes:
        raise SettingsError(
            f"the weights take {_human(weight_bytes)} of the {_human(available_bytes)} of memory that are available, "
            f"which leaves no room for a KV cache: free memory or give a smaller --model."
        )
    num_blocks, lever, reason = _choose(settings, spec, window, available_bytes, weight_bytes)
    size = num_blocks * spec.block_bytes
    if num_blocks < 1:
        raise SettingsError(f"{reason} is less than one KV page ({_human(spec.block_bytes)}): raise {lever}.")
    if size > room:
        raise SettingsError(
            f"{reason} asks for a KV cache of {_human(size)}, but the weights leave {_human(room)} of memory: "
            f"lower {lever}."
        )
    num_tokens = num_blocks * spec.block_size
    notes = []
    if num_tokens < window:
        origin = "the model" if settings.max_model_len is None else "--max-model-len"
        notes.append(
            f"The KV cache holds {num_tokens} tokens, less than the {window} that {origin} asks for: sequences are "
            f"limited to {num_tokens} tokens. Raise {lever} for longer ones."
        )
    return PoolPlan(num_blocks, num_tokens, size, min(window, num_tokens), reason, tuple(notes))


def _choose(
    settings: Settings, spec: KVSpec, window: int, available_bytes: int, weight_bytes: int
) -> tuple[int, str, str]:
    """(blocks, the flag to change if that is wrong, what decided in words)"""
    if settings.num_gpu_blocks_override is not None:
        blocks = settings.num_gpu_blocks_override
        return blocks, "--num-gpu-blocks-override", f"--num-gpu-blocks-override {blocks}"
    if settings.kv_cache_memory_bytes is not None:
        size = settings.kv_cache_memory_bytes
        return spec.blocks_for_bytes(size), "--kv-cache-memory-bytes", f"--kv-cache-memory-bytes {_human(size)}"
    share = settings.gpu_memory_utilization
    if share is not None:
        left = max(0, int(available_bytes * share) - weight_bytes)
        reason = f"--gpu-memory-utilization {share:g} ({_human(left)} beside the weights)"
        return spec.blocks_for_bytes(left), "--gpu-memory-utilization", reason
    half = int((available_bytes - weight_bytes) * AUTO_SHARE)
    options = [
        (
            settings.max_num_seqs * spec.blocks_for_tokens(window),
            f"--max-num-seqs {settings.max_num_seqs} full windows",
        ),
        (spec.blocks_for_bytes(AUTO_BYTES), f"the default limit of {_human(AUTO_BYTES)}"),
        (spec.blocks_for_bytes(half), f"half of the memory that the weights leave ({_human(half)})"),
    ]
    blocks, reason = min(options)
    return blocks, "--kv-cache-memory-bytes", reason


def _human(count: int) -> str:
    """'2.5 GiB'"""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
