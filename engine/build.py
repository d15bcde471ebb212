"""Joins the parts of an engine: settings and a model on disk become an `EngineCore` that runs."""

import logging
import platform
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from configs.kv import KVFormat, KVSpec
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
    dtype_name = _dtype(settings)
    dtype, kv_format = DTYPES[dtype_name]
    set_threads(settings.num_threads or usable_cores())
    spec = KVSpec(config.kv_layers(kv_format), settings.block_size)
    plan = resolve_num_blocks(
        settings,
        spec,
        window=config.effective_window(settings.max_model_len),
        available_bytes=available_memory(),
        weight_bytes=config.weight_bytes(dtype_name),
    )
    for note in plan.notes:
        logger.warning(note)
    limits = SchedulerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, plan.max_model_len)

    report(EngineLoading("loading weights"))
    model = load_model(
        path, config, dtype, plan.max_model_len, lambda fraction: report(EngineLoading("loading weights", fraction))
    )
    report(EngineLoading("warming up", 1.0))
    executor = SingleExecutor(ModelRunner(model, config, spec, plan.num_blocks, limits), launch.eos_token_ids)
    executor.warm_up()
    kv = KVManager(plan.num_blocks, settings.block_size, settings.enable_prefix_caching)
    scheduler = Scheduler(limits, kv, launch.eos_token_ids)
    cache = CacheInfo(
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        bytes_per_block=spec.block_bytes,
        bytes_per_token=spec.bytes_per_token,
        dtype=kv_format.value,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    core = EngineCore(scheduler, executor, NoGrammar(), cache)
    summary = _summary(launch.name, config, dtype, plan, settings)
    summary["answers"] = _exactness(model, dtype)
    return core, EngineReady(cache, summary, config.vocab_size)


def available_memory() -> int:
    """Bytes this process may still take: what the system has, or what its container allows if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or cgroups of the first version
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def _dtype(settings: Settings) -> DType:
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


def _summary(name: str, config: ModelConfig, dtype: torch.dtype, plan: PoolPlan, settings: Settings) -> dict[str, str]:
    """The start-up block's lines, in order."""
    gib = plan.pool_bytes / 2**30
    return {
        "model": f"{name} ({config.architecture}, {config.num_parameters / 1e6:.0f} million parameters)",
        "dtype": str(dtype).removeprefix("torch."),
        "device": f"CPU, {num_threads()} threads",
        "attention": _kernel("paged_attention", dtype),
        "linear": _kernel("pack_linear", dtype),
        "KV pool": f"{plan.num_blocks} pages of {settings.block_size} tokens = {plan.num_tokens} tokens, {gib:.2f} GiB "
        f"({plan.decided_by})",
        "fits": f"{plan.num_tokens / plan.max_model_len:.1f} requests of the full {plan.max_model_len} tokens",
        "prefix cache": "on" if settings.enable_prefix_caching else "off",
    }


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
    return report_exactness(layers, dtype)
