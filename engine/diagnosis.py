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

from configs.model import ModelConfig
from configs.settings import Settings
from configs.version import VERSION
from engine.build import CGROUP, DTYPES, available_memory, dtype_for, plan_pool, usable_cores
from engine.errors import StartupError
from engine.served_model import ServedModel
from engine.source import find
from kernels import ops
from kernels.cpu import library
from kernels.cpu.build import BuildError, compiler_version, find_compiler
from kernels.cpu.exactness import probe
from kernels.cpu.library import ISA_TITLES
from kernels.registry import PROVIDERS, NoImplementation, choose
from kernels.threads import set_threads

SELF_TEST_SECONDS = 10.0
SHAPES = ((960, 576), (576, 1536), (4864, 896), (896, 4864), (3072, 8192))
"""(outputs, inputs) of linear layers of models people run here: 135 million to 3 billion parameters."""
ELEMENTWISE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
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
    set_threads(settings.num_threads or usable_cores())
    found.add("machine", machine)
    found.add("versions", versions)
    found.add("kernels", lambda: kernels(settings, found.problems))
    found.add("model and KV cache", lambda: model(settings))
    found.add("Hugging Face Hub", hub)
    found.add("self-test", lambda: self_test(settings, found.problems))
    return found


# ------------------------------------------------------------------ machine
def machine() -> dict[str, str]:
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
    return {**{name: value for name, value in facts.items() if value}, "GPU": _gpus()}


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
    if not torch.cuda.is_available():
        is_built_for_one = torch.version.cuda or torch.version.hip
        without = f"torch {torch.__version__} is built without CUDA"
        reason = "its driver is missing, or there is none" if is_built_for_one else without
        return f"none that torch sees ({reason})"
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        found.append(f"{name}, compute capability {major}.{minor}, {_gib(free)} of {_gib(total)} free")
    return "; ".join(found)


# ------------------------------------------------------------------ software
def versions() -> dict[str, str]:
    found = {"octavo": VERSION, "python": platform.python_version(), "system": platform.platform()}
    for name in LIBRARIES:
        found[name] = importlib.metadata.version(name)
    try:
        found["compiler"] = compiler_version(find_compiler())
    except BuildError as error:
        found["compiler"] = str(error)
    return found


def kernels(settings: Settings, problems: list[str]) -> dict[str, str]:
    """For each op what serves it and why what would be preferred does not."""
    native = library.load()
    if native is None:
        problems.append(f"There are no native kernels, so answers come slowly: {library.refusal()}.")
    dtype = DTYPES[dtype_for(settings)][0]
    rows = {"library": "none" if native is None else str(native.path), "number format": _name(dtype)}
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        for op in _all_ops():
            name = op if len(devices) == 1 else f"{op} ({device})"
            try:
                choice = choose(op, device, dtype)
            except NoImplementation as error:
                rows[name] = f"none: {error}"
                continue
            refused = [f"{other}: {reason}" for other, reason in choice.refused if "is preferred" not in reason]
            rows[name] = choice.name + (f" (not {'; '.join(refused)})" if refused else "")
    return rows


def _all_ops() -> Iterable[str]:
    return dict.fromkeys(candidate.op for provider in PROVIDERS for candidate in import_module(provider).CANDIDATES)


# ------------------------------------------------------------------ model
def model(settings: Settings) -> dict[str, str]:
    """The KV cache that would be chosen now. Raises `StartupError` for a model that is here and cannot be served."""
    source = find(settings)
    if source is None:
        name = "the default model" if settings.model is None else settings.model
        return {"model": f"{name} is not on this machine yet; octavo serve fetches it"}
    config = ModelConfig.from_source(source.path)
    ServedModel.load(source, settings)
    layout, plan = plan_pool(settings, config)
    parameters = f"{config.num_parameters / 1e6:.0f} million parameters"
    weights = config.weight_bytes(dtype_for(settings))
    return {
        "model": f"{source.name} ({config.architecture}, {parameters})",
        "found at": f"{source.path} ({source.origin})",
        "weights": _gib(weights),
        "KV cache": f"{plan.num_blocks} pages of {settings.block_size} tokens = {plan.num_tokens} tokens, "
        f"{_gib(plan.pool_bytes)}, {layout.bytes_per_token} bytes a token",
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
def self_test(settings: Settings, problems: list[str], seconds: float = SELF_TEST_SECONDS) -> dict[str, str]:
    """Linear layers of real shapes: right, and a row's bits the same alone and in company."""
    started, rows, skipped = time.monotonic(), {}, 0
    inexact = []
    for dtype in dict.fromkeys([DTYPES[dtype_for(settings)][0], torch.float32]):
        for outputs, inputs in SHAPES:
            if time.monotonic() - started > seconds:
                skipped += 1
                continue
            name = f"linear {inputs} to {outputs}, {_name(dtype)}"
            words, is_exact = _try_linear(outputs, inputs, dtype)
            rows[name] = words
            if not is_exact:
                inexact.append(f"{name}: {words}")
    if inexact:
        problems.append(
            "Answers may be changed a little by other requests or by --num-threads, since rounding on this machine "
            f"depends on a row's company ({'; '.join(inexact)})."
        )
    rows["took"] = f"{time.monotonic() - started:.1f} s" + (f"; {skipped} shapes were left out" if skipped else "")
    return rows


def _try_linear(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[str, bool]:
    generator = torch.Generator().manual_seed(outputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    packed = ops.pack_linear(weight)
    x = torch.randn(8, inputs, generator=generator).to(dtype)
    expected = x.double() @ weight.double().T
    error = float((ops.linear(x, packed).double() - expected).abs().max() / expected.abs().max())
    if not error <= ELEMENTWISE_TOLERANCE[dtype]:
        return f"WRONG: off by {error:.2g} of the largest result", False
    reason = probe(packed, dtype)
    return ("exact" if reason is None else f"not exact: {reason}"), reason is None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
