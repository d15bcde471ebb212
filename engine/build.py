"""Joins the parts of an engine: settings and a model on disk become an `EngineCore` that runs."""

import logging
import platform
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from configs.kv import KVFormat, KVLayout
from configs.limits import SchedulerLimits
from configs.model import DType, ModelConfig
from configs.pool import PoolPlan, resolve_num_blocks
from configs.settings import Settings
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.errors import StartupError
from engine.messages import CacheInfo, EngineLoading, EngineReady, Launch
from engine.model.base import CausalLM
from engine.model.layers.linear import Linear
from engine.model.registry import load_model
from engine.ports import NoGrammar
from engine.runner.executor import SingleExecutor
from engine.runner.model_runner import ModelRunner
from kernels.cpu.exactness import inexact
from kernels.cpu.exactness import report as report_exactness
from kernels.registry import choose
from kernels.threads import num_threads, set_threads

logger = logging.getLogger("octavo.engine")

DTYPES: dict[DType, tuple[torch.dtype, KVFormat]] = {
    "bfloat16": (torch.bfloat16, KVFormat.BF16),
    "float32": (torch.float32, KVFormat.FP32),
}
CGROUP = Path("/sys/fs/cgroup")


def build_core(launch: Launch, report: Callable[[EngineLoading], None]) -> tuple[EngineCore, EngineReady]:
    """Loads the model, allocates the pool, warms up. Raises `StartupError`, which names the flag to change."""
    settings = Settings.create(launch.settings)
    path = Path(launch.path)
    config = ModelConfig.from_source(path)
    dtype, kv_format = DTYPES[dtype_for(settings)]
    set_threads(settings.num_threads or usable_cores())
    layout, plan = plan_pool(settings, config)
    for note in plan.notes:
        logger.warning(note)
    limits = SchedulerLimits(
        settings.max_num_seqs, settings.max_num_batched_tokens, plan.max_model_len, policy=settings.scheduling_policy
    )

    report(EngineLoading("loading weights"))
    model = load_model(
        path, config, dtype, plan.max_model_len, lambda fraction: report(EngineLoading("loading weights", fraction))
    )
    report(EngineLoading("warming up", 1.0))
    executor = SingleExecutor(ModelRunner(model, config, layout, plan.num_pages, limits), launch.eos_token_ids)
    executor.warm_up()
    kv = KVManager(plan.num_blocks, settings.block_size, settings.enable_prefix_caching, windows=plan.windows)
    scheduler = Scheduler(limits, kv, launch.eos_token_ids)
    cache = CacheInfo(
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        bytes_per_block=layout.block_bytes,
        bytes_per_token=layout.bytes_per_token,
        dtype=kv_format.value,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=settings.enable_prefix_caching,
        pool_bytes=plan.pool_bytes,
    )
    core = EngineCore(scheduler, executor, NoGrammar(), cache)
    summary = _summary(launch.name, config, dtype, plan, layout)
    summary["prefix cache"] = "on" if settings.enable_prefix_caching else "off"
    summary["answers"] = _exactness(model, dtype)
    return core, EngineReady(cache, summary, config.vocab_size)


def plan_pool(settings: Settings, config: ModelConfig) -> tuple[KVLayout, PoolPlan]:
    """What a page holds and how many there will be. Raises `SettingsError`, which names the flag to change."""
    dtype_name = dtype_for(settings)
    window = config.effective_window(settings.max_model_len)
    layout = KVLayout.of(config.kv_layers(DTYPES[dtype_name][1]), settings.block_size, window)
    plan = resolve_num_blocks(
        settings,
        layout,
        window=window,
        available_bytes=available_memory(),
        weight_bytes=config.weight_bytes(dtype_name),
    )
    return layout, plan


def available_memory() -> int:
    """Bytes this process may still take: what the system has, or what its container allows if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or cgroups of the first version
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def dtype_for(settings: Settings) -> DType:
    """bfloat16 where the processor computes in it; 'auto' otherwise falls back to float32."""
    supported = torch.cpu._is_avx512_bf16_supported()
    if settings.dtype == "bfloat16" and not supported:
        raise StartupError(
            f"--dtype bfloat16: this {platform.machine()} processor does not compute in it; use --dtype float32."
        )
    if settings.dtype == "auto":
        return "bfloat16" if supported else "float32"
    return settings.dtype


def usable_cores() -> int:
    """Cores this process may use: physical ones, since two threads of one core share its arithmetic units, and no more
    than its container's quota pays for."""
    usable = len(psutil.Process().cpu_affinity() or [0])
    usable = min(usable, psutil.cpu_count(logical=False) or usable)
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        usable = min(usable, int(quota) // int(period))
    except (OSError, ValueError):  # no container, no quota ("max"), or cgroups of the first version
        pass
    return max(1, usable)


def _summary(name: str, config: ModelConfig, dtype: torch.dtype, plan: PoolPlan, layout: KVLayout) -> dict[str, str]:
    """The start-up block's lines, in order."""
    return {
        "model": f"{name} ({config.architecture}, {config.num_parameters / 1e6:.0f} million parameters)",
        "dtype": str(dtype).removeprefix("torch."),
        "device": f"CPU, {num_threads()} thread" + "s" * (num_threads() > 1),
        "attention": _kernel("paged_attention", dtype),
        "linear": _kernel("pack_linear", dtype),
        "KV pool": _pools(plan, layout),
        "fits": f"{plan.full_sequences:.1f} requests of the full {plan.max_model_len} tokens",
    }


def _pools(plan: PoolPlan, layout: KVLayout) -> str:
    """Which layers have how many pages."""
    size = layout.block_size
    parts = []
    for group, count in zip(layout.groups, plan.num_pages, strict=True):
        if not group.layers:
            continue
        pages = f"{count} pages of {size} tokens = {count * size} tokens"
        if len(layout.groups) > 1:
            seen = "everything" if group.window is None else f"{group.window} tokens"
            pages += f" for {len(group.layers)} of {layout.num_layers} layers, which see {seen}"
        parts.append(pages)
    return f"{' and '.join(parts)}, {plan.pool_bytes / 2**30:.2f} GiB ({plan.decided_by})"


def _kernel(op: str, dtype: torch.dtype) -> str:
    """What serves an op, and why what would have been preferred does not."""
    choice = choose(op, "cpu", dtype)
    better: dict[str, list[str]] = {}
    for name, reason in choice.refused:
        if not reason.endswith("is preferred"):
            better.setdefault(reason, []).append(name)
    refusals = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in better.items())
    return f"{choice.name} (not {refusals})" if refusals else choice.name


def _exactness(model: CausalLM, dtype: torch.dtype) -> str:
    """Whether this machine's linear layers give a row the same bits alone and in company: asked, not assumed."""
    layers = {name: module.packed for name, module in model.named_modules() if isinstance(module, Linear)}
    failures = inexact(layers, dtype)
    if failures:
        logger.warning("Answers %s.", report_exactness(failures))
    return report_exactness(failures)
