"""Joins the parts of an engine: settings and a model on disk become an `EngineCore` that runs."""

import logging
from collections.abc import Callable
from pathlib import Path

from configs.kv import KVLayout
from configs.kv_flags import PLAIN, describe, format_name, kv_layers, pair_name, plain_bytes_per_token
from configs.limits import SchedulerLimits
from configs.model import SizedConfig
from configs.pool import Costs, Memory, PoolPlan, size_pools, weights_in_words
from configs.settings import Settings
from engine.cache_setup import prepare_cache
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.device import Device
from engine.kv_scales import scales_of
from engine.messages import CacheInfo, EngineLoading, EngineReady, Launch
from engine.model.layers.linear import Linear
from engine.model.registry import load_model, read_config
from engine.ports import NoGrammar
from engine.runner import company
from engine.runner.executor import SingleExecutor
from engine.runner.kv_store import KVTransforms, static_transforms
from engine.runner.model_runner import ModelRunner
from kernels.cpu.exactness import ON_A_GPU, inexact
from kernels.cpu.exactness import report as report_exactness
from kernels.registry import KVFormats, choose

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
        settings.max_num_seqs,
        settings.max_num_batched_tokens,
        plan.max_model_len,
        policy=settings.scheduling_policy,
        kv_refresh_interval=settings.kv_refresh_interval,
    )
    static = _static_scales(settings, config, device)
    # The pools may hold less, but what a model computes must not depend on how much memory happened to be free.
    window = config.effective_window(settings.max_model_len)

    report(EngineLoading("loading weights"))
    with device.enough_memory("the weights"):
        model = load_model(
            path,
            config,
            device.dtype,
            window,
            lambda fraction: report(EngineLoading("loading weights", fraction)),
            device.place,
            config.weight_format(settings.quantization, device.is_gpu),
        )
    device.settle()
    report(EngineLoading("warming up", 1.0))
    with device.enough_memory("a step"):
        texts = launch.tried_token_ids, launch.fit_token_ids
        transforms, fidelity = prepare_cache(settings, config, model, device, texts, window, static)
    plain = None if limits.kv_refresh_interval is None else PLAIN[device.dtype_name]
    runner = ModelRunner(model, config, layout, plan.num_pages, limits, device.place, plain, transforms)
    executor = SingleExecutor(runner, launch.eos_token_ids)
    with device.enough_memory("a step"):
        executor.warm_up(largest=device.is_gpu)
    kv = KVManager(plan.num_blocks, settings.block_size, settings.enable_prefix_caching, windows=plan.windows)
    scheduler = Scheduler(limits, kv, launch.eos_token_ids)
    cache = _cache_info(settings, layout, plan, device)
    if texts[1]:
        cache.fitted_layers = sum(layer.fits_keys for group in layout.groups for layer in group.spec.layers)
    if fidelity is not None:
        cache.divergence, cache.agreement = fidelity.divergence, fidelity.agreement
    core = EngineCore(scheduler, executor, NoGrammar(), cache)
    summary = _summary(launch.name, settings, config, device, plan)
    summary["prefix cache"] = "on" if settings.enable_prefix_caching else "off"
    if fidelity is not None:
        summary["KV fidelity"] = str(fidelity)
    if runner.refresh is not None:
        summary["refresh"] = refresh_in_words(settings, runner.refresh.pool.nbytes)
    summary["answers"] = _exactness(runner, device)
    return core, EngineReady(cache, summary, config.vocab_size)


def _static_scales(settings: Settings, config: SizedConfig, device: Device) -> list[KVTransforms] | None:
    """None without a file of scales."""
    scales = scales_of(settings, config, device.dtype_name)
    layers = kv_layers(settings, config, device.dtype_name)
    return None if scales is None else static_transforms(scales, layers, device.place)


def _cache_info(settings: Settings, layout: KVLayout, plan: PoolPlan, device: Device) -> CacheInfo:
    return CacheInfo(
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        bytes_per_block=layout.block_bytes,
        bytes_per_token=layout.bytes_per_token,
        dtype=format_name(settings, device.dtype_name),
        max_model_len=plan.max_model_len,
        enable_prefix_caching=settings.enable_prefix_caching,
        pool_bytes=plan.pool_bytes,
        plain_bytes_per_token=plain_bytes_per_token(layout, device.dtype_name),
        scales=settings.kv_cache_scales,
        refresh_interval=settings.kv_refresh_interval,
    )


def plan_pool(settings: Settings, config: SizedConfig, device: Device) -> tuple[KVLayout, PoolPlan]:
    """What a page holds and how many there will be. Raises `SettingsError`, which names the flag to change."""
    costs = Costs.of(settings, config, device.dtype_name, device.is_gpu)
    return costs.layout, size_pools(settings, costs, Memory(device.free_bytes, device.is_gpu))


def _summary(name: str, settings: Settings, config: SizedConfig, device: Device, plan: PoolPlan) -> dict[str, str]:
    """The start-up block's lines, in order."""
    costs = Costs.of(settings, config, device.dtype_name, device.is_gpu)
    layout = costs.layout
    return {
        "model": f"{name} ({config.title})",
        "dtype": device.dtype_name + (f" ({device.dtype_note})" if device.dtype_note else ""),
        "weights": weights_in_words(costs, device.dtype_name),
        "device": device.words,
        "attention": attention_in_words(layout, device),
        "linear": _kernel("pack_linear" if costs.quantization == "none" else "pack_coded_linear", device),
        "KV format": describe(settings, layout, device.dtype_name),
        "KV pool": _pools(plan, layout),
        "fits": f"{plan.full_sequences:.1f} requests of the full {plan.max_model_len} tokens",
    }


def refresh_in_words(settings: Settings, scratch_bytes: int) -> str:
    interval, size = settings.kv_refresh_interval, scratch_bytes / 2**30
    return f"every {interval} generated tokens, {size:.2f} GiB for one sequence in full precision"


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


def attention_in_words(layout: KVLayout, device: Device) -> str:
    """What serves attention, for each of the formats in which layers keep K and V."""
    layers = [layer for group in layout.groups for layer in group.spec.layers]
    served: dict[str, list[str]] = {}
    for formats in dict.fromkeys(layer.formats for layer in layers):
        served.setdefault(_kernel("paged_attention", device, formats), []).append(pair_name(*formats))
    if len(served) == 1:
        return next(iter(served))
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in served.items())


def _kernel(op: str, device: Device, formats: KVFormats | None = None) -> str:
    """What serves an op, and why what would have been preferred does not. formats: of pages, where it works on them."""
    choice = choose(op, device.place.type, device.dtype, formats)
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
