"""Which device serves, in which number format, and what a machine or its container lets the engine take. What torch
would say of a GPU is given by hand; nothing here pretends to compute on one."""

import ctypes
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from configs.settings import Settings
from engine import device
from engine.device import GPU, Device, NoGPU, available_memory, look_for_gpu, usable_cores
from engine.errors import StartupError
from kernels.threads import num_threads, set_threads

CORES = usable_cores()
GIB = 2**30
HOPPER = GPU("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, has_bfloat16=True)
TURING = GPU("Tesla T4", (7, 5), 15 * GIB, 14 * GIB, has_bfloat16=False)
PASCAL = GPU("Tesla P40", (6, 1), 24 * GIB, 23 * GIB, has_bfloat16=False)
WITHOUT_CUDA = NoGPU("torch 2.13.0+cpu is built without CUDA", torch_could=False)
WITHOUT_DRIVER = NoGPU("Found no NVIDIA driver on your system", torch_could=True)
WITHOUT_GPU = NoGPU("No CUDA GPUs are available", torch_could=True)


def find(found: GPU | NoGPU, **given: object) -> Device:
    return Device.find(Settings(**given), lambda: found)


def refusal(found: GPU | NoGPU, **given: object) -> str:
    with pytest.raises(StartupError) as caught:
        find(found, **given)
    return str(caught.value)


# ------------------------------------------------------------------ which
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_gpu_serves_where_there_is_one(asked: str) -> None:
    found = find(HOPPER, device=asked)
    assert found.place == torch.device("cuda", 0) and found.is_gpu
    assert (found.free_bytes, found.total_bytes) == (139 * GIB, 140 * GIB)
    assert found.words == "NVIDIA H200, compute capability 9.0, 139.00 of 140.00 GiB free at start"


def test_the_cpu_serves_where_none_is_or_it_is_asked_for() -> None:
    def never() -> NoGPU:
        raise AssertionError("--device cpu makes no context on a GPU")

    for found in (find(WITHOUT_CUDA), Device.find(Settings(device="cpu"), never)):
        assert found.place == torch.device("cpu") and not found.is_gpu and found.name == "CPU"
        assert 0 < found.free_bytes < found.total_bytes == psutil.virtual_memory().total
    assert find(WITHOUT_DRIVER).name == "CPU (no GPU: Found no NVIDIA driver on your system)"


@pytest.mark.parametrize("missing", [WITHOUT_CUDA, WITHOUT_DRIVER, WITHOUT_GPU])
def test_a_gpu_that_is_asked_for_and_missing_is_a_sentence(missing: NoGPU) -> None:
    said = refusal(missing, device="cuda")
    assert said.startswith(f"--device cuda is not possible here: {missing.reason}. ") and "--device cpu." in said
    assert ("install a torch" in said) is (missing is WITHOUT_CUDA)


def test_this_machine_is_asked() -> None:
    found = look_for_gpu()
    if not (torch.version.cuda or torch.version.hip):
        assert found == NoGPU(f"torch {torch.__version__} is built without CUDA", torch_could=False)
    elif isinstance(found, NoGPU):
        assert found.torch_could and found.reason and "\n" not in found.reason


def test_torchs_reasons_lose_their_advice() -> None:
    error = RuntimeError(
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from\n"
        "http://www.nvidia.com/Download/index.aspx"
    )
    assert device._words(error) == WITHOUT_DRIVER.reason
    assert device._words(RuntimeError()) == "RuntimeError"


# ------------------------------------------------------------------ number format
@pytest.mark.parametrize(
    ("gpu", "asked", "dtype", "note"),
    [
        (HOPPER, "auto", "bfloat16", ""),
        (TURING, "auto", "float16", "compute capability 7.5 has no bfloat16"),
        (PASCAL, "auto", "float32", "compute capability 6.1 has neither bfloat16 nor fast float16"),
        (HOPPER, "float16", "float16", ""),
        (PASCAL, "float16", "float16", ""),
        (TURING, "float32", "float32", ""),
    ],
)
def test_number_format_of_a_gpu(gpu: GPU, asked: str, dtype: str, note: str) -> None:
    found = find(gpu, dtype=asked)
    assert (found.dtype_name, found.dtype_note) == (dtype, note)
    assert found.dtype is getattr(torch, dtype)


def test_bfloat16_that_a_gpu_lacks_is_refused() -> None:
    assert refusal(TURING, dtype="bfloat16") == (
        "--dtype bfloat16: the Tesla T4 (compute capability 7.5) does not compute in it; use --dtype float16 or "
        "float32."
    )


def test_number_format_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, auto in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda supported=supported: supported)
        assert find(WITHOUT_CUDA).dtype_name == auto
        assert find(WITHOUT_CUDA, dtype="float32").dtype is torch.float32
    assert "processor does not compute in it" in refusal(WITHOUT_CUDA, dtype="bfloat16")
    assert "--dtype float16 is for GPUs" in refusal(WITHOUT_CUDA, dtype="float16")


# ------------------------------------------------------------------ the process
def test_threads_of_the_cpu_are_set_and_shown() -> None:
    before = num_threads()
    try:
        found = find(WITHOUT_CUDA, num_threads=2)
        found.prepare()
        assert num_threads() == 2 and found.words == "CPU, 2 threads"
    finally:
        set_threads(before)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "CUDA out of memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error [CUDA]: out of memory"),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErr"), "CUDA error: out of memory"),
    ],
    ids=["a tensor", "a kernel", "a graph"],
)
def test_a_gpu_without_memory_is_a_sentence_that_names_flags(error: RuntimeError, reason: str) -> None:
    with pytest.raises(StartupError) as caught, find(TURING).enough_memory("the weights"):
        raise error
    assert "Tesla T4" in str(caught.value) and "no memory left for the weights" in str(caught.value)
    assert "--gpu-memory-utilization" in str(caught.value) and str(caught.value).endswith(f" ({reason}).")


@pytest.mark.parametrize("is_used", [True, False])
def test_what_is_not_used_goes_back_to_a_gpu_that_is_used(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    device.free_unused()
    assert calls == ["emptied"] * is_used


def test_other_errors_stay_what_they_are() -> None:
    for error in (RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("out of memory")):
        with pytest.raises(type(error)) as caught, find(TURING).enough_memory("the weights"):
            raise error
        assert caught.value is error


# ------------------------------------------------------------------ the container
@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("100000 100000", 1),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("90000000 100000", CORES),
        ("max 100000", CORES),
    ],
)
def test_threads_stay_within_the_containers_quota(cgroup: Path, quota: str, cores: int):
    (cgroup / "cpu.max").write_text(quota + "\n")
    assert usable_cores() == cores == find(WITHOUT_CUDA).threads == find(HOPPER).threads


def test_without_a_container_every_core_counts(cgroup: Path):
    assert 1 <= usable_cores() <= len(psutil.Process().cpu_affinity())


def test_memory_is_what_the_container_has_left(cgroup: Path):
    (cgroup / "memory.current").write_text("3000\n")
    (cgroup / "memory.max").write_text("10000\n")
    assert available_memory() == 7000 == find(WITHOUT_CUDA).free_bytes
    (cgroup / "memory.max").write_text("2000\n")
    assert available_memory() == 0
    (cgroup / "memory.max").write_text("max\n")
    assert available_memory() > 1 << 20


# ------------------------------------------------------------------ memory of steps
FAULTS = """
import ctypes, resource, sys, torch
from configs.settings import Settings
from engine.device import Device

if sys.argv[1] == "settled":
    Device.find(Settings(device="cpu", num_threads=1)).settle()
else:  # what glibc begins with; it changes that by what it sees
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD

def step():
    kept = [torch.ones(2 << 20) for _ in range(6)]  # 8 MiB each

for _ in range(5):  # what was given back before is found again
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_memory_of_a_step_is_kept_for_the_next() -> None:
    def faults(how: str) -> int:
        run = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert faults("settled") < 50 < 1000 < faults("mapped anew")


PIECES = """
import ctypes, sys, torch
from configs.settings import Settings
from engine.device import Device

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

device = Device.find(Settings(device="cpu", num_threads=1))
before = resident()
pieces = [torch.ones(16 << 10) for _ in range(1000)]  # 64 KiB each, in the heap
kept = pieces[-1]
del pieces
left = resident() - before
device.settle()
print(left >> 20, (resident() - before) >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_what_loading_left_in_pieces_goes_back() -> None:
    run = subprocess.run([sys.executable, "-c", PIECES], capture_output=True, text=True, check=True)
    left, settled = map(int, run.stdout.split())
    assert settled < 10 < 40 < left
