"""Joins the parts of an engine: settings and a model on disk become an `EngineCore` that runs."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from configs.graphs import decode_sizes
from configs.kv import KVLayout, LayerKV
from configs.kv_flags import PLAIN, describe, format_name, kv_layers, plain_bytes_per_token
from configs.limits import SchedulerLimits
from configs.model import SizedConfig
from configs.pool import Costs, Memory, PoolPlan, size_pools, weights_in_words
from configs.settings import Settings
from engine.attention_backends import attention_in_words, check_backend, cost_of_pages, described
from engine.cache_setup import prepare_cache
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.device import Device
from engine.invariance import check_invariance, linear_backend
from engine.kv_scales import scales_of
from engine.messages import CacheInfo, EngineLoading, EngineReady, Launch
from engine.model.base import Architecture
from engine.model.layers.linear import Linear
from engine.model.registry import load_model, read_config
from engine.ports import NoGrammar
from engine.runner import company
from engine.runner.ahead import AheadExecutor
from engine.runner.executor import ModelExecutor, SingleExecutor
from engine.runner.kv_store import KVTransforms, static_transforms
from engine.runner.link import CudaLink
from engine.runner.model_runner import CacheUse, ModelRunner
from engine.runner.warm_up import warm_up
from kernels import flash, reference
from kernels.exactness import ON_A_GPU, inexact
from kernels.exactness import report as report_exactness
from kernels.registry import AUTO, choose

logger = logging.getLogger("octavo.engine")


def build_core(launch: Launch, report: Callable[[EngineLoading], None]) -> tuple[EngineCore, EngineReady]:
    """Loads the model, allocates the pool, warms up. Raises `StartupError`, which names the flag to change."""
    settings = Settings.create(launch.settings)
    path = Path(launch.path)
    config = read_config(path, settings.trust_remote_code)
    device = Device.find(settings)
    device.prepare()
    check_backend(settings, device, config)
    check_invariance(settings, device, config)
    layout, plan = plan_pool(settings, config, device)
    for note in plan.notes:
        logger.warning(note)
    limits = _limits(settings, plan, device)
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
            linear_backend(settings, device),
        )
    device.settle()
    report(EngineLoading("warming up", 1.0))
    with device.enough_memory("a step"):
        texts = launch.tried_token_ids, launch.fit_token_ids
        transforms, fidelity = prepare_cache(settings, config, model, device, texts, window, static)
    plain = None if limits.kv_refresh_interval is None else PLAIN[device.dtype_name]
    use = CacheUse(transforms, plain, settings.attention_backend)
    runner = ModelRunner(model, config, layout, plan.num_pages, limits, device.place, use)
    with device.enough_memory("a step"):
        executor, graphs = _start(settings, runner, layout, device, launch.eos_token_ids)
    kv = KVManager(plan.num_blocks, settings.block_size, settings.enable_prefix_caching, windows=plan.windows)
    scheduler = Scheduler(limits, kv, launch.eos_token_ids)
    cache = _cache_info(settings, layout, plan, device)
    if texts[1]:
        cache.fitted_layers = sum(layer.fits_keys for group in layout.groups for layer in group.spec.layers)
    if fidelity is not None:
        cache.divergence, cache.agreement = fidelity.divergence, fidelity.agreement
    core = EngineCore(scheduler, executor, NoGrammar(), cache, pipeline_depth=2 if device.is_gpu else 1)
    summary = _summary(launch.name, settings, config, device, plan) | graphs
    if fidelity is not None:
        summary["KV fidelity"] = str(fidelity)
    if runner.refresh is not None:
        summary["refresh"] = refresh_in_words(settings, runner.refresh.pool.nbytes)
    with device.enough_memory("a step"):
        summary["answers"] = _exactness(executor, settings, device)
    return core, EngineReady(cache, summary, config.vocab_size)


def _limits(settings: Settings, plan: PoolPlan, device: Device) -> SchedulerLimits:
    return SchedulerLimits(
        settings.max_num_seqs,
        settings.step_tokens(device.is_gpu),
        plan.max_model_len,
        policy=settings.scheduling_policy,
        kv_refresh_interval=settings.kv_refresh_interval,
    )


def _start(
    settings: Settings, runner: ModelRunner, layout: KVLayout, device: Device, eos_token_ids: tuple[int, ...]
) -> tuple[ModelExecutor, dict[str, str]]:
    """The executor, warm; and what the start-up block says of CUDA graphs."""
    if not device.is_gpu:
        executor = SingleExecutor(runner, eos_token_ids)
        warm_up(executor)
        return executor, {}
    ahead = AheadExecutor(runner, eos_token_ids, device.place, CudaLink(device.place))
    warm_up(ahead, largest=True)
    if reason := _no_graphs(settings, runner, layout, device):
        return ahead, {"CUDA graphs": f"none ({reason})"}
    ahead.capture(decode_sizes(settings.max_num_seqs))
    return ahead, {"CUDA graphs": str(ahead.graphs)}


def _no_graphs(settings: Settings, runner: ModelRunner, layout: KVLayout, device: Device) -> str | None:
    """Why steps cannot be captured: something in them may wait for the GPU."""
    if settings.enforce_eager:
        return "--enforce-eager"
    if not isinstance(runner.model, Architecture):
        return "transformers' code computes, which may wait for the GPU"
    layers = [layer for group in layout.groups for layer in group.spec.layers]
    for op, backend in (("store_kv", AUTO), ("paged_attention", settings.attention_backend)):
        if _in_plain_torch(op, layers, device, backend):
            return f"{reference.NAME} serves {op}, which waits for the GPU"
    return None


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
    costs = costs_of(settings, config, device)
    return costs.layout, size_pools(settings, costs, Memory(device.free_bytes, device.is_gpu))


def costs_of(settings: Settings, config: SizedConfig, device: Device) -> Costs:
    """Raises as `Costs.of`."""
    layers = kv_layers(settings, config, device.dtype_name)
    gathers = _in_plain_torch("paged_attention", layers, device, settings.attention_backend)
    return Costs.of(settings, config, device.dtype_name, device.is_gpu, gathers)


def _in_plain_torch(op: str, layers: Iterable[LayerKV], device: Device, backend: str = AUTO) -> bool:
    """Whether nothing better serves the op for one of the layers."""
    found = (choose(op, device.place.type, device.dtype, layer.formats, backend) for layer in layers)
    return any(choice.name == reference.NAME for choice in found)


def _summary(name: str, settings: Settings, config: SizedConfig, device: Device, plan: PoolPlan) -> dict[str, str]:
    """The start-up block's lines, in order."""
    costs = costs_of(settings, config, device)
    layout = costs.layout
    lines = {
        "model": f"{name} ({config.title})",
        "dtype": device.dtype_name + (f" ({device.dtype_note})" if device.dtype_note else ""),
        "weights": weights_in_words(costs, device.dtype_name),
        "device": device.words,
        "attention": attention_in_words(layout, device, settings.attention_backend),
        "linear": _linear(settings, costs, device),
        "KV format": describe(settings, layout, device.dtype_name),
        "KV pool": _pools(plan, layout),
        "a step": f"at most {costs.step_tokens:,} tokens, {settings.max_num_seqs} sequences (--max-num-batched-tokens)",
        "fits": f"{plan.full_sequences:.1f} requests of the full {plan.max_model_len} tokens",
    }
    if settings.attention_backend == flash.BACKEND and settings.block_size >= flash.PAGE:
        lines["pages"] = cost_of_pages(layout)
    lines["prefix cache"] = "on" if settings.enable_prefix_caching else "off"
    return lines


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


def _linear(settings: Settings, costs: Costs, device: Device) -> str:
    where = device.place.type, device.dtype
    if costs.quantization != "none":
        return described(choose("pack_coded_linear", *where))
    return described(choose("pack_linear", *where, None, linear_backend(settings, device)))


def _exactness(executor: ModelExecutor, settings: Settings, device: Device) -> str:
    """Whether this machine gives a row the same bits alone and in company: asked, not assumed. Of the linear layers one
    by one, then of the whole model."""
    if device.is_gpu and not settings.batch_invariant:
        return ON_A_GPU
    modules = executor.runner.model.named_modules()
    layers = {name: module.packed for name, module in modules if isinstance(module, Linear)}
    failures = inexact(layers, device.dtype, device.place)
    if not failures and (reason := company.compare(executor)):
        failures = {"the model": reason}
    if failures:
        logger.warning("Answers %s.", report_exactness(failures, device.place))
    return report_exactness(failures, device.place)
