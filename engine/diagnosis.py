"""What this machine has, what Octavo would do with it, and whether it computes right: the facts of `octavo doctor`.

Each section is a table of words. What keeps Octavo from serving as promised stands among the problems, in one sentence
each that says what to do. Nothing is fetched.
"""

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import psutil
import torch

from configs.kv_flags import PLAIN, describe
from configs.pool import weights_in_words
from configs.refresh import scratch_bytes
from configs.settings import Settings
from configs.version import VERSION
from engine.attention_backends import attention_in_words, backend_verdicts, check_backend, described
from engine.build import costs_of, plan_pool, refresh_in_words
from engine.device import CGROUP, Device, NoGPU, available_memory, look_for_gpu, usable_cores
from engine.errors import StartupError
from engine.invariance import check_invariance, linear_backend
from engine.kv_scales import KVScales, scales_of
from engine.model.registry import read_config
from engine.served_model import ServedModel
from engine.source import find
from kernels import ops
from kernels.cpu import library
from kernels.cpu.build import BuildError, compiler_version, find_compiler
from kernels.cpu.library import ISA_TITLES
from kernels.exactness import probe
from kernels.registry import AUTO, INVARIANT, PROVIDERS, NoImplementation, choose

OF_LOGITS = ("softmax_weights", "draw_truncated")
"""Ops of logits, which are fp32 whatever the model computes in."""
SELF_TEST_SECONDS = 10.0
SHAPES = ((960, 576), (576, 1536), (4864, 896), (896, 4864), (3072, 8192))
"""(outputs, inputs) of linear layers of models people run here: 135 million to 3 billion parameters."""
ELEMENTWISE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Of a linear's largest result, beside the same product in float64."""
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "fastapi", "uvicorn")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CPUINFO = Path("/proc/cpuinfo")


@dataclass
class Diagnosis:
    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    """Title -> name -> words."""
    problems: list[str] = field(default_factory=list)
    """Sentences."""

    def add(self, title: str, make: Callable[[], dict[str, str]]) -> None:
        """A section that cannot be made is a problem; the others are told all the same."""
        try:
            self.sections[title] = make()
        except StartupError as error:
            self.problems.append(str(error))
        except Exception as error:  # a doctor who falls ill is no use
            self.problems.append(f"{title}: {type(error).__name__}: {error}. Please report this.")


def diagnose(settings: Settings) -> Diagnosis:
    """Takes some ten seconds, nearly all of them for the self-test."""
    found = Diagnosis()
    try:
        device = Device.find(settings)
    except StartupError as error:
        found.problems.append(str(error))
        device = Device.find(settings.model_copy(update={"device": "cpu", "dtype": "auto"}))
    device.prepare()
    found.add("machine", lambda: machine(device))
    found.add("versions", versions)
    found.add("kernels", lambda: kernels(settings, device, found.problems))
    found.add("attention", lambda: attention(settings, device))
    found.add("model and KV cache", lambda: model(settings, device))
    found.add("Hugging Face Hub", hub)
    found.add("self-test", lambda: self_test(device, found.problems, backend=linear_backend(settings, device)))
    return found


# ------------------------------------------------------------------ machine
def machine(device: Device) -> dict[str, str]:
    memory = psutil.virtual_memory()
    facts = {
        "processor": f"{_processor()} ({platform.machine()})",
        "cores": f"{psutil.cpu_count(logical=False)} physical, {psutil.cpu_count()} logical, {usable_cores()} to use",
        "instruction sets": _instruction_sets(),
        "caches": _caches(),
        "memory": f"{_gib(memory.total)} in all, {_gib(available_memory())} to use",
    }
    for name, file in (("container memory", "memory.max"), ("container processors", "cpu.max")):
        if limit := _limit(file):
            facts[name] = limit
    return {**{name: value for name, value in facts.items() if value}, "GPU": _gpus(), "serves on": device.words}


def _processor() -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _instruction_sets() -> str:
    native = library.load()
    return (
        "" if native is None else ", ".join(ISA_TITLES[isa] for isa in native.cpu_isas if isa != "baseline") or "none"
    )


def _caches() -> str:
    sizes = []
    for folder in sorted(CACHES.glob("index*")):
        kind = (folder / "type").read_text().strip()
        if kind != "Instruction":
            sizes.append(f"L{(folder / 'level').read_text().strip()} {(folder / 'size').read_text().strip()}")
    return ", ".join(sizes)


def _limit(file: str) -> str:
    """Of the container; '' where there is none."""
    try:
        first, *period = (CGROUP / file).read_text().split()
        if first == "max":
            return ""
        return f"{int(first) / int(period[0]):g}" if period else _gib(int(first))
    except (OSError, ValueError):
        return ""


def _gpus() -> str:
    """The one that would serve, asked in earnest; of others the names."""
    first = look_for_gpu()
    if isinstance(first, NoGPU):
        return f"none that torch sees ({first.reason})"
    others = [torch.cuda.get_device_name(index) for index in range(1, torch.cuda.device_count())]
    beside = f"; beside it {', '.join(others)} (CUDA_VISIBLE_DEVICES chooses)" if others else ""
    major, minor = first.capability
    memory = f"{_gib(first.free_bytes)} of {_gib(first.total_bytes)} free"
    return f"{first.name}, compute capability {major}.{minor}, {memory}{beside}"


# ------------------------------------------------------------------ software
def versions() -> dict[str, str]:
    found = {"octavo": VERSION, "python": platform.python_version(), "system": platform.platform()}
    for name in LIBRARIES:
        found[name] = importlib.metadata.version(name)
    found["torch"] = torch.__version__  # with the build: +cpu, +cu130
    try:
        found["compiler"] = compiler_version(find_compiler())
    except BuildError as error:
        found["compiler"] = str(error)
    return found


def kernels(settings: Settings, device: Device, problems: list[str]) -> dict[str, str]:
    """For each op what serves it under `settings`, and why what would be preferred does not."""
    native = library.load()
    if native is None and not device.is_gpu:
        problems.append(f"There are no native kernels, so answers come slowly: {library.refusal()}.")
    rows = {"library": "none" if native is None else str(native.path), "number format": device.dtype_name}
    if device.dtype_note:
        rows["number format"] += f" ({device.dtype_note})"
    backends = {"paged_attention": settings.attention_backend, "pack_linear": linear_backend(settings, device)}
    for op in _all_ops():
        dtype = torch.float32 if op in OF_LOGITS else device.dtype
        try:
            choice = choose(op, device.place.type, dtype, backend=backends.get(op, AUTO))
        except NoImplementation as error:
            rows[op] = f"none: {error}"
            continue
        rows[op] = described(choice)
    return rows


def _all_ops() -> Iterable[str]:
    return dict.fromkeys(candidate.op for provider in PROVIDERS for candidate in import_module(provider).CANDIDATES)


# ------------------------------------------------------------------ model
def attention(settings: Settings, device: Device) -> dict[str, str]:
    """The verdict on each backend, for the model if it is here. If that cannot be served `model` says why."""
    try:
        source = find(settings)
        config = None if source is None else read_config(source.path, settings.trust_remote_code)
        return backend_verdicts(settings, device, config)
    except StartupError:
        return backend_verdicts(settings, device)


def model(settings: Settings, device: Device) -> dict[str, str]:
    """The KV cache that would be chosen now. Raises `StartupError` for a model that is here and cannot be served."""
    source = find(settings)
    if source is None:
        check_backend(settings, device)
        check_invariance(settings, device)
        if settings.kv_cache_scales is not None:
            KVScales.load(Path(settings.kv_cache_scales))
        name = "the default model" if settings.model is None else settings.model
        return {"model": f"{name} is not on this machine yet; octavo serve fetches it"}
    config = read_config(source.path, settings.trust_remote_code)
    ServedModel.load(source, settings)
    check_backend(settings, device, config)
    check_invariance(settings, device, config)
    layout, plan = plan_pool(settings, config, device)
    scales_of(settings, config, device.dtype_name)
    refresh = {}
    if settings.kv_refresh_interval is not None:
        size = scratch_bytes(layout, PLAIN[device.dtype_name], plan.max_model_len)
        refresh = {"refresh": refresh_in_words(settings, size)}
    costs = costs_of(settings, config, device)
    return {
        "model": f"{source.name} ({config.title})",
        "found at": f"{source.path} ({source.origin})",
        "weights": weights_in_words(costs, device.dtype_name),
        "KV cache": f"{plan.num_blocks} pages of {settings.block_size} tokens = {plan.num_tokens} tokens, "
        f"{_gib(plan.pool_bytes)}",
        "KV format": describe(settings, layout, device.dtype_name),
        **refresh,
        "attention": attention_in_words(layout, device, settings.attention_backend),
        "decided by": plan.decided_by,
        "longest sequence": f"{plan.max_model_len} tokens",
        **({"note": " ".join(plan.notes)} if plan.notes else {}),
    }


def hub() -> dict[str, str]:
    from huggingface_hub import constants, get_token, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
        size = f"{len(cache.repos)} repositories, {_gib(cache.size_on_disk)}"
    except CacheNotFound:
        size = "not there yet"
    return {
        "cache": f"{constants.HF_HUB_CACHE} ({size})",
        "address": constants.ENDPOINT,
        "token": "none" if get_token() is None else "there is one",
        "network": "not used (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "used where the cache has no copy",
    }


# ------------------------------------------------------------------ self-test
def self_test(
    device: Device, problems: list[str], seconds: float = SELF_TEST_SECONDS, backend: str = AUTO
) -> dict[str, str]:
    """Linear layers of real shapes: right, and on the CPU a row's bits the same alone and in company; on a GPU if
    `backend` (of `ops.pack_linear`) says so."""
    started, rows, skipped = time.monotonic(), {}, 0
    inexact = []
    for dtype in dict.fromkeys([device.dtype, torch.float32]):
        for outputs, inputs in SHAPES:
            if time.monotonic() - started > seconds:
                skipped += 1
                continue
            name = f"linear {inputs} to {outputs}, {_name(dtype)}"
            words, is_right = _try_linear(outputs, inputs, dtype, device, backend)
            rows[name] = words
            if not is_right:
                inexact.append(f"{name}: {words}")
    if inexact:
        causes = "other requests" if device.is_gpu else "other requests or by --num-threads"
        problems.append(
            f"Answers may be changed a little by {causes}, since rounding on this machine depends on a row's company "
            f"({'; '.join(inexact)})."
        )
    rows["took"] = f"{time.monotonic() - started:.1f} s" + (f"; {skipped} shapes were left out" if skipped else "")
    return rows


def _try_linear(outputs: int, inputs: int, dtype: torch.dtype, device: Device, backend: str) -> tuple[str, bool]:
    """(what came out in words, whether that is as it should be)"""
    generator = torch.Generator().manual_seed(outputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    packed = ops.pack_linear(weight.to(device.place), backend=backend)
    x = torch.randn(8, inputs, generator=generator).to(dtype)
    expected = x.double() @ weight.double().T
    found = ops.linear(x.to(device.place), packed).cpu()
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    if not error <= ELEMENTWISE_TOLERANCE[dtype]:
        return f"WRONG: off by {error:.2g} of the largest result", False
    if device.is_gpu and backend == AUTO:
        return f"right (in any company it is exact on a GPU with --{INVARIANT} only)", True
    reason = probe(packed, dtype, device.place)
    return ("exact" if reason is None else f"not exact: {reason}"), reason is None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
