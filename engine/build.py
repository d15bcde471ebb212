"""Joins the parts of an engine: settings and a model on disk become an `EngineCore` that runs."""

import logging
from collections.abc import Callable
from pathlib import Path

from configs.kv import KVLayout
from configs.limits import SchedulerLimits
from configs.model import SizedConfig
from configs.pool import GPU_SHARE, PoolPlan, resolve_num_blocks, step_bytes
from configs.settings import Settings
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.device import Device
from engine.messages import CacheInfo, EngineLoading, EngineReady, Launch
from engine.model.layers.linear import Linear
from engine.model.registry import load_model, read_config
from engine.ports import NoGrammar
from engine.runner import company
from engine.runner.executor import SingleExecutor
from engine.runner.model_runner import ModelRunner
from kernels.cpu.exactness import ON_A_GPU, inexact
from kernels.cpu.exactness import report as report_exactness
from kernels.registry import choose

logger = logging.getLogger("octavo.engine")


def build_core(launch: Launch, report: Callable[[EngineLoading], None]) -> tuple[EngineCore, EngineReady]:
    """Loads the model, allocates the pool, warms up. Raises `StartupError`, which names the flag to change."""
    settings = Settings.create(launch.settings)
    path = Path(launch.path)
    config = read_config(path, settings.trust_remote_code)
    device = Device.find(settings)
    device.prepare()
    layout, plan = plan_pool(settings, config, device)
    for note in plan.notes:
        logger.warning(note)
    limits = SchedulerLimits(
        settings.max_num_seqs, settings.max_num_batched_tokens, plan.max_model_len, policy=settings.scheduling_policy
    )

    report(EngineLoading("loading weights"))
    with device.enough_memory("the weights"):
        model = load_model(
            path,
            config,
            device.dtype,
            plan.max_model_len,
            lambda fraction: report(EngineLoading("loading weights", fraction)),
            device.place,
        )
    device.trim()
    report(EngineLoading("warming up", 1.0))
    runner = ModelRunner(model, config, layout, plan.num_pages, limits, device.place)
    executor = SingleExecutor(runner, launch.eos_token_ids)
    with device.enough_memory("a step"):
        executor.warm_up(largest=device.is_gpu)
    kv = KVManager(plan.num_blocks, settings.block_size, settings.enable_prefix_caching, windows=plan.windows)
    scheduler = Scheduler(limits, kv, launch.eos_token_ids)
    cache = CacheInfo(
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        bytes_per_block=layout.block_bytes,
        bytes_per_token=layout.bytes_per_token,
        dtype=device.kv_format.value,
        max_model_len=plan.max_model_len,
        enable_prefix_caching=settings.enable_prefix_caching,
        pool_bytes=plan.pool_bytes,
    )
    core = EngineCore(scheduler, executor, NoGrammar(), cache)
    summary = _summary(launch.name, config, device, plan, layout)
    summary["prefix cache"] = "on" if settings.enable_prefix_caching else "off"
    summary["answers"] = _exactness(runner, device)
    return core, EngineReady(cache, summary, config.vocab_size)


def plan_pool(settings: Settings, config: SizedConfig, device: Device) -> tuple[KVLayout, PoolPlan]:
    """What a page holds and how many there will be. Raises `SettingsError`, which names the flag to change."""
    window = config.effective_window(settings.max_model_len)
    layout = KVLayout.of(config.kv_layers(device.kv_format), settings.block_size, window)
    work = 0
    if device.is_gpu:
        sizes = {"vocab_size": config.vocab_size, "num_parameters": config.num_parameters}
        work = step_bytes(settings, layout, window=window, **sizes)
    plan = resolve_num_blocks(
        settings,
        layout,
        window=window,
        available_bytes=device.free_bytes,
        weight_bytes=config.weight_bytes(device.dtype_name),
        work_bytes=work,
        default_share=GPU_SHARE if device.is_gpu else None,
    )
    return layout, plan


def _summary(name: str, config: SizedConfig, device: Device, plan: PoolPlan, layout: KVLayout) -> dict[str, str]:
    """The start-up block's lines, in order."""
    return {
        "model": f"{name} ({config.title})",
        "dtype": device.dtype_name + (f" ({device.dtype_note})" if device.dtype_note else ""),
        "device": device.words,
        "attention": _kernel("paged_attention", device),
        "linear": _kernel("pack_linear", device),
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


def _kernel(op: str, device: Device) -> str:
    """What serves an op, and why what would have been preferred does not."""
    choice = choose(op, device.place.type, device.dtype)
    better: dict[str, list[str]] = {}
    for name, reason in choice.refused:
        if not reason.endswith("is preferred"):
            better.setdefault(reason, []).append(name)
    refusals = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in better.items())
    return f"{choice.name} (not {refusals})" if refusals else choice.name


def _exactness(runner: ModelRunner, device: Device) -> str:
    """Whether this machine gives a row the same bits alone and in company: asked, not assumed. Of the linear layers one
    by one, then of the whole model."""
    if device.is_gpu:
        return ON_A_GPU
    layers = {name: module.packed for name, module in runner.model.named_modules() if isinstance(module, Linear)}
    failures = inexact(layers, device.dtype)
    if not failures and (reason := company.compare(runner)):
        failures = {"the model": reason}
    if failures:
        logger.warning("Answers %s.", report_exactness(failures))
    return report_exactness(failures)
