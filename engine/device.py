"""What the model runs on: the CPU or one GPU, how much memory it has, and the number format it computes in.

    --device, --dtype, --num-threads ─┐
                                      ├─> Device.find ─> pool, weights, batches, the start-up block, the doctor
    torch, the system, the container ─┘

On a GPU logits of some rows come to the CPU to be sampled, so threads matter there too.
"""

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.model import DType
from configs.settings import Settings
from engine.errors import StartupError
from kernels.threads import num_threads, set_threads

DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
FAST_FLOAT16 = (7, 0)
"""The compute capability from which on products of float16 numbers have units of their own (Volta)."""
OUT_OF_MEMORY = "out of memory"
"""Stands in the message of every error for want of a GPU's memory."""
CGROUP = Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of `mallopt`, as in glibc's malloc.h."""
LARGEST_MMAP_THRESHOLD = 32 << 20
"""Bytes; glibc takes no larger one."""


@dataclass(frozen=True)
class GPU:
    """A GPU that computes, as torch describes it."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    """With this process's context on it, and nothing else of ours."""
    has_bfloat16: bool
    """In hardware; emulated does not count."""


@dataclass(frozen=True)
class NoGPU:
    """There is none to use."""

    reason: str
    """In words, without a full stop."""
    torch_could: bool
    """torch is built for one."""


def look_for_gpu() -> GPU | NoGPU:
    """The first GPU that this process sees (CUDA_VISIBLE_DEVICES says which), tried by a sum. Makes a context on it."""
    if not (torch.version.cuda or torch.version.hip):
        return NoGPU(f"torch {torch.__version__} is built without CUDA", torch_could=False)
    place = torch.device("cuda", 0)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(place)
        torch.ones(1, device=place).add_(1.0).item()  # fails where torch has no code for this GPU, or it has no memory
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(place)
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    except (RuntimeError, AssertionError) as error:
        return NoGPU(_words(error), torch_could=True)
    return GPU(properties.name, (properties.major, properties.minor), total, free, has_bfloat16)


def _words(error: Exception) -> str:
    """torch's reason without its advice: the driver is missing or too old, no GPU is visible, ..."""
    return " ".join(str(error).split()).split(". Please")[0].rstrip(".") or type(error).__name__


@dataclass(frozen=True)
class Device:
    """Where weights, KV pool and a step's tensors are. `find` makes one."""

    place: torch.device
    name: str
    """As people know it."""
    total_bytes: int
    free_bytes: int
    """What this process might still take when it was asked: before the weights were loaded."""
    dtype_name: DType
    dtype_note: str
    """Why no better format than this one; "" where there is nothing to explain."""
    threads: int
    """Of the CPU, to compute with."""

    @classmethod
    def find(cls, settings: Settings, look: Callable[[], GPU | NoGPU] = look_for_gpu) -> "Device":
        """A GPU where there is one, unless --device says otherwise.

        Raises `StartupError` where --device or --dtype asks for what cannot be. `look` is not asked for --device cpu.
        """
        found = NoGPU("--device cpu", torch_could=False) if settings.device == "cpu" else look()
        threads = settings.num_threads or usable_cores()
        if isinstance(found, GPU):
            name = f"{found.name}, compute capability {_version(found)}"
            dtype, note = gpu_dtype(settings, found)
            place = torch.device("cuda", 0)
            return cls(place, name, found.total_bytes, found.free_bytes, dtype, note, threads)
        if settings.device == "cuda":
            cure = "use --device cpu"
            if not found.torch_could:
                cure = f"install a torch that has it (docs/gpu.md), or {cure}"
            raise StartupError(f"--device cuda is not possible here: {found.reason}. To go on, {cure}.")
        name = f"CPU (no GPU: {found.reason})" if found.torch_could else "CPU"
        return cls(torch.device("cpu"), name, total_memory(), available_memory(), cpu_dtype(settings), "", threads)

    @property
    def is_gpu(self) -> bool:
        return self.place.type != "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def words(self) -> str:
        """For the start-up block."""
        if self.is_gpu:
            return f"{self.name}, {self.free_bytes / 2**30:.2f} of {self.total_bytes / 2**30:.2f} GiB free at start"
        threads = num_threads()
        return f"{self.name}, {threads} thread" + "s" * (threads > 1)

    def prepare(self) -> None:
        """Sets what belongs to the whole process. Call it before anything is computed."""
        if self.is_gpu:
            torch.cuda.set_device(self.place)
            torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32, whatever the process had chosen
            torch.set_num_threads(self.threads)  # for the sampler; the native kernels' own threads are never started
        else:
            set_threads(self.threads)

    def settle(self) -> None:
        """When all is loaded. A GPU gets back what that left in torch's cache: pieces that a large pool could not use.

        On a CPU the C library will keep what a step's tensors give up, for the next step: it would hand large pieces
        back to the system, and each 4 KiB of the next tensor would cost a page fault. So its memory never shrinks below
        what its largest step took.
        """
        if self.is_gpu:
            torch.cuda.empty_cache()
        elif hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc
            libc.malloc_trim(0)  # what loading has left in pieces
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

    @contextmanager
    def enough_memory(self, doing: str) -> Iterator[None]:
        """Turns a GPU's lack of memory into a `StartupError`. doing: "loading the weights".

        Whoever it is that finds none: torch for tensors and for graphs, Triton for its kernels. Each has an exception
        of its own; the words are the driver's.
        """
        try:
            yield
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if OUT_OF_MEMORY in line]
            if not lines:
                raise
            raise StartupError(
                f"{self.name} has no memory left for {doing}: lower --gpu-memory-utilization, --max-num-seqs or "
                f"--max-num-batched-tokens, or give a smaller --model ({lines[0].split('. ')[0]})."
            ) from error


def free_unused() -> None:
    """Gives back to the GPU, if this process uses one, what torch keeps for later of tensors that are gone."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


# ------------------------------------------------------------------ number formats
def gpu_dtype(settings: Settings, gpu: GPU) -> tuple[DType, str]:
    """(format, why no better one): bfloat16 in hardware, else float16 where that is fast, else float32."""
    version = f"compute capability {_version(gpu)}"
    if settings.dtype == "bfloat16" and not gpu.has_bfloat16:
        raise StartupError(
            f"--dtype bfloat16: the {gpu.name} ({version}) does not compute in it; use --dtype float16 or float32."
        )
    if settings.dtype != "auto":
        return settings.dtype, ""
    if gpu.has_bfloat16:
        return "bfloat16", ""
    if gpu.capability >= FAST_FLOAT16:
        return "float16", f"{version} has no bfloat16"
    return "float32", f"{version} has neither bfloat16 nor fast float16"


def cpu_dtype(settings: Settings) -> DType:
    """bfloat16 where the processor computes in it; 'auto' otherwise falls back to float32."""
    supported = torch.cpu._is_avx512_bf16_supported()
    if settings.dtype == "float16":
        raise StartupError(
            "--dtype float16 is for GPUs: no CPU kernel computes in it; use --dtype bfloat16 or float32."
        )
    if settings.dtype == "bfloat16" and not supported:
        raise StartupError(
            f"--dtype bfloat16: this {platform.machine()} processor does not compute in it; use --dtype float32."
        )
    if settings.dtype == "auto":
        return "bfloat16" if supported else "float32"
    return settings.dtype


def _version(gpu: GPU) -> str:
    return f"{gpu.capability[0]}.{gpu.capability[1]}"


# ------------------------------------------------------------------ the CPU and its container
# psutil is imported where a CPU is asked about: a GPU whose --num-threads are given does without.
def total_memory() -> int:
    """Bytes of the whole machine."""
    import psutil

    return int(psutil.virtual_memory().total)


def available_memory() -> int:
    """Bytes this process may still take: what the system has, or what its container allows if that is less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or cgroups of the first version
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def usable_cores() -> int:
    """Cores this process may use: physical ones, since two threads of one core share its arithmetic units, and no more
    than its container's quota pays for."""
    import psutil

    usable = len(psutil.Process().cpu_affinity() or [0])
    usable = min(usable, psutil.cpu_count(logical=False) or usable)
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        usable = min(usable, int(quota) // int(period))
    except (OSError, ValueError):  # no container, no quota ("max"), or cgroups of the first version
        pass
    return max(1, usable)
