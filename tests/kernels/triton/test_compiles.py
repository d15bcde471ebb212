"""Every kernel compiles for real GPUs, as its launcher calls it, down to machine code and without spilling registers.

No GPU is needed: a launch, with tensors of the CPU, compiles for an NVIDIA GPU that is not there and runs nothing. Nor
does any launcher make the host wait for one.
"""

import functools
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import OFF, columns

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import KernelInterface  # noqa: E402

from configs.kv import KVFormat, KVOrder, KVSpec, LayerKV  # noqa: E402
from kernels.int8_weight import Int8Weight  # noqa: E402
from kernels.ops import KVTransform, LayerPages  # noqa: E402
from kernels.triton import attention, blocks, elementwise, linear, sampling, store  # noqa: E402


class AbsentGPU:
    """What Triton asks its driver when it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 1000 + self.capability  # a number of its own: compiled kernels are kept by it

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


SHARED = {80: 166912, 90: 232448, 100: 232448}
"""Bytes that a program may have, by compute capability."""


@pytest.fixture(params=[90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Kernels that were launched, compiled for compute capability 9.0 (H100, H200), 8.0 (A100), 10.0 (B200)."""
    compiled: list[Any] = []

    def launch(kernel: Any, grid: Any, *arguments: object, **options: object) -> None:
        compiled.append(kernel.run(*arguments, grid=grid, warmup=True, **options))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: functools.partial(launch, kernel, grid))
    monkeypatch.setattr(driver, "_active", AbsentGPU(request.param))
    for module in (attention, linear):
        monkeypatch.setattr(module, "shared_bytes_of", lambda device: SHARED[request.param])
    attention.launch_of.cache_clear()
    yield compiled
    attention.launch_of.cache_clear()


def spilled(kernel: Any, folder: Path) -> int:
    """Bytes of a thread's stack: what found no register."""
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(folder / "kernel.cubin")]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", words)
    assert found, words
    return int(found[1])


def loads(kernel: Any) -> set[str]:
    """How wide global memory is read: "v4.b32", "b16", ..."""
    return set(re.findall(r"ld\.global(?:\.\w+::\w+)*\.((?:v\d\.)?b\d+)", kernel.asm["ptx"]))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def rotary(heads: tuple[int, int], dims: int, turning: int, wide: bool, norms: bool, dtype: torch.dtype) -> None:
    fused = empty(4, (heads[0] + 2 * heads[1]) * dims, dtype=dtype)
    q, k, _ = fused.split([heads[0] * dims, heads[1] * dims, heads[1] * dims], dim=1)
    q, k = q.unflatten(1, (heads[0], dims)), k.unflatten(1, (heads[1], dims))
    table, positions = torch.empty(64, turning // 2), torch.zeros(4, dtype=torch.int64)
    weight = empty(dims, dtype=torch.float32 if wide else dtype)
    if norms:
        elementwise.norm_rotary(q, k, weight, weight, 1e-6, positions, table, table)
    else:
        elementwise.rotary(q, k, positions, table, table)


def norm(width: int, wide: bool, dtype: torch.dtype, rows: int = 4, heads: int = 0) -> None:
    x = empty(rows, heads, width, dtype=dtype) if heads else empty(rows, width, dtype=dtype)
    elementwise.rms_norm(x, empty(width, dtype=torch.float32 if wide else dtype), 1e-6)


def add_norm(width: int, dtype: torch.dtype) -> None:
    elementwise.add_rms_norm(
        empty(4, width, dtype=dtype), empty(4, width, dtype=dtype), empty(width, dtype=dtype), 1e-6
    )


def store_kv(
    k_format: KVFormat,
    v_format: KVFormat,
    dims: int,
    dtype: torch.dtype,
    *,
    static: bool = False,
    fitted: bool = False,
    fed_back: bool = False,
) -> None:
    kind = LayerKV(8, dims, k_format, value_format=v_format, static=static)
    spec = KVSpec((kind,), 16, KVOrder.ROWS)
    channels, feedback = torch.empty(8, dims), torch.empty(8, dims, dims)
    k_transform = KVTransform(
        channels if static or fitted else None, channels if fitted else None, feedback if fed_back else None
    )
    pool = torch.empty(2, spec.block_bytes, dtype=torch.uint8)
    pages = LayerPages(pool, spec, 0, k_transform, KVTransform(channels if static else None))
    fused = empty(4, 24 * dims, dtype=dtype)
    k, v = (fused[:, start * dims : (start + 8) * dims].unflatten(1, (8, dims)) for start in (8, 16))
    store.store_kv(k, v, pages, ids())


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def ids() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64)


def pool(blocks: int = 8) -> torch.Tensor:
    return torch.empty(blocks, 4096, dtype=torch.uint8)


WIDE_LOADS = {"v4.b32", "v2.b64"}
"""16 bytes for each thread: what it takes to keep memory busy."""

STORES: dict[str, Callable[[], object]] = {
    "store_kv": lambda: store_kv(KVFormat.BF16, KVFormat.BF16, 128, BF16),
    "store_kv, other numbers": lambda: store_kv(KVFormat.FP32, KVFormat.FP16, 80, BF16),
    "store_kv, e5m2": lambda: store_kv(KVFormat.FP8_E5M2, KVFormat.BF16, 64, FP16),
    "store_kv, e4m3 and int8": lambda: store_kv(KVFormat.FP8_E4M3, KVFormat.INT8, 128, BF16, fitted=True),
    "store_kv, int4": lambda: store_kv(KVFormat.INT4, KVFormat.INT4, 96, FP32),
    "store_kv, static": lambda: store_kv(KVFormat.INT8, KVFormat.FP8_E4M3, 256, BF16, static=True),
    "store_kv, int8 fed back": lambda: store_kv(KVFormat.INT8, KVFormat.INT4, 128, BF16, fitted=True, fed_back=True),
    "store_kv, int4 fed back": lambda: store_kv(KVFormat.INT4, KVFormat.INT4, 64, BF16, fitted=True, fed_back=True),
    "store_kv, e4m3 fed back": lambda: store_kv(KVFormat.FP8_E4M3, KVFormat.FP8_E4M3, 128, FP16, fed_back=True),
}

LAUNCHES: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: norm(4096, False, BF16),
    "rms_norm of one row": lambda: norm(4096, False, BF16, rows=1),
    "rms_norm, wide weight": lambda: norm(1152, True, BF16),
    "rms_norm of heads": lambda: norm(128, False, FP16, heads=8),
    "rms_norm, fp32": lambda: norm(8192, False, FP32),
    "add_rms_norm": lambda: add_norm(8192, BF16),
    "add_rms_norm, fp16": lambda: add_norm(1024, FP16),
    "rotary": lambda: rotary((32, 8), 128, 128, False, False, BF16),
    "rotary of some dims": lambda: rotary((9, 3), 64, 32, False, False, FP32),
    "norm_rotary": lambda: rotary((16, 8), 128, 128, False, True, BF16),
    "norm_rotary of some dims, wide weight": lambda: rotary((8, 1), 80, 40, True, True, BF16),
    "norm_rotary, fp32": lambda: rotary((4, 1), 256, 256, True, True, FP32),
    "gate_mul": lambda: elementwise.gate_mul(empty(4, 2 * 14336), "silu"),
    "gate_mul, tanh": lambda: elementwise.gate_mul(empty(4, 2 * 6912, dtype=FP16), "gelu_tanh"),
    "gather_rows": lambda: elementwise.gather_rows(empty(8, 4096), ids(), 1.0),
    "gather_rows, scaled": lambda: elementwise.gather_rows(empty(8, 1152), ids(), 34.0),
    "copy_blocks": lambda: blocks.copy_blocks(pool(), [(0, 1), (2, 3)]),
    "gather_blocks": lambda: blocks.gather_blocks(pool(), ids(), pool(4)),
    "scatter_blocks": lambda: blocks.scatter_blocks(pool(4), ids(), pool()),
    **STORES,
    "draw": lambda: sampling.draw(empty(2, 151936, dtype=FP32), *columns(2, [OFF])),
    "draw, more than 2^18": lambda: sampling.draw(empty(2, 262208, dtype=FP32), *columns(2, [OFF])),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_compiles(name: str, launched: list[Any], tmp_path: Path) -> None:
    LAUNCHES[name]()
    assert launched
    for kernel in launched:
        assert kernel.asm["cubin"]
        assert spilled(kernel, tmp_path) <= (0 if kernel.metadata.target.arch == 90 else 64)
        assert loads(kernel) & WIDE_LOADS, loads(kernel)


@pytest.mark.parametrize("name", [name for name in STORES if "e4m3" in name or "int" in name])
def test_codes_have_the_references_bits(name: str, launched: list[Any]) -> None:
    """Products that are fused with sums, and divisions that are nearly right, would give others."""
    STORES[name]()
    for kernel in launched:
        assert not re.search(r"fma\.rn\.f32|div\.(full|approx)|ftz", kernel.asm["ptx"])
        assert "div.rn.f32" in kernel.asm["ptx"]


# ------------------------------------------------------------------ attention
F = KVFormat


def attend(
    heads: tuple[int, int],
    dims: int,
    dtype: torch.dtype = BF16,
    formats: tuple[KVFormat, KVFormat] = (F.BF16, F.BF16),
    static: bool = False,
    width: int = 256,
    skip: int = 0,
    **asked: Any,
) -> attention.Shape:
    """First a row of each of two sequences, as plain decode has them; then one and many: all kernels that there are.
    width: of tables that begin `skip` numbers behind the start of their memory."""
    kind = LayerKV(heads[1], dims, formats[0], value_format=formats[1], static=static)
    spec = KVSpec((kind,), 16, KVOrder.ROWS)
    k, v = (KVTransform(torch.ones(heads[1], dims) if static and each.may_be_static else None) for each in formats)
    pages = LayerPages(torch.empty(4, spec.block_bytes, dtype=torch.uint8), spec, 0, k, v)
    rows = attention.PREFILL_HEADS // heads[0] + 2
    q, tables = empty(rows, heads[0], dims, dtype=dtype), torch.zeros(skip + 2 * width, dtype=torch.int32)[skip:]
    lengths = torch.tensor([4000, 4000], dtype=torch.int32)
    for count in (2, rows):
        starts = torch.tensor([0, 1, count], dtype=torch.int32)
        attention.paged_attention(q[:count], pages, tables.view(2, width), starts, lengths, dims**-0.5, **asked)
    flags = asked.get("window") is not None, asked.get("softcap") is not None
    return attention.shape_of(kind, 16, spec.block_bytes, heads[0], dtype, *flags)


ATTENTION: dict[str, tuple[Callable[[], attention.Shape], int]] = {
    "bf16": (lambda: attend((32, 8), 128), 144),
    "bf16, all that is asked": (lambda: attend((9, 3), 64, window=100, softcap=30.0, sinks=torch.zeros(9)), 96),
    "bf16, long heads": (lambda: attend((8, 4), 256), 768),
    "int8": (lambda: attend((32, 8), 128, BF16, (F.INT8, F.INT8)), 656),
    "int4": (lambda: attend((32, 8), 128, BF16, (F.INT4, F.INT4)), 256),
    "bf16, int4": (lambda: attend((32, 8), 96, BF16, (F.BF16, F.INT4)), 336),
    "e4m3": (lambda: attend((32, 8), 128, BF16, (F.FP8_E4M3, F.FP8_E4M3)), 672),
    "static e4m3, e5m2": (lambda: attend((32, 8), 128, BF16, (F.FP8_E4M3, F.FP8_E5M2), static=True), 256),
    "fp16": (lambda: attend((32, 32), 80, FP16, (F.FP16, F.FP16)), 304),
    "fp32": (lambda: attend((9, 3), 64, FP32, (F.FP32, F.FP32)), 320),
    "fp32, long heads": (lambda: attend((32, 8), 128, FP32, (F.FP32, F.FP32)), 512),
    "fp32, the longest heads": (lambda: attend((8, 4), 256, FP32, (F.FP32, F.FP32)), 2560),
}
"""With the bytes of a thread's stack that are borne on capability 9.0, by Triton 3.6 and 3.9: of all splits' sums, read
and written once a split, and in tiles that some lines do not see to the end."""


def test_the_same_code_serves_whatever_differs_from_step_to_step(launched: list[Any]) -> None:
    """What is compiled while requests wait, they wait for."""
    for width, skip in ((1, 0), (15, 3), (16, 0), (17, 1), (64, 2)):
        attend((8, 2), 64, width=width, skip=skip)
    for first, count in ((0, 1), (1, 3), (3, 8)):
        blocks.copy_blocks(torch.empty(64, 4096, dtype=torch.uint8), [(i, 30 + i) for i in range(first, first + count)])
    code: dict[tuple[str, str], set[str]] = {}
    for kernel in launched:  # ALONE is a constant, and known before any request
        code.setdefault((kernel.metadata.name, str(kernel.src.constants)), set()).add(kernel.hash)
    assert {name for name, _ in code} == {"attend_splits", "attend_rows", "merge_splits", "_copy"}
    assert all(len(hashes) == 1 for hashes in code.values()), code


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "bf16" else pytest.mark.slow) for name in ATTENTION]
)
def test_attention_compiles(name: str, launched: list[Any], tmp_path: Path) -> None:
    """Tiles come 16 bytes at a time while others are computed, by the units that multiply matrices; a program takes no
    more memory than `launch_of` reckons with."""
    make, borne = ATTENTION[name]
    shape = make()
    assert all(spilled(kernel, tmp_path) <= borne for kernel in launched if kernel.metadata.target.arch == 90)
    products = [kernel for kernel in launched if kernel.metadata.name in ("attend_splits", "attend_rows")]
    assert len(products) == 3
    for kernel in products:
        among = attention.PREFILL if kernel.metadata.name == "attend_rows" else attention.DECODE
        ptx, launch = kernel.asm["ptx"], attention.launch_of(shape, among, torch.device("cpu"))
        arch, is_fp32 = kernel.metadata.target.arch, "fp32" in name
        weights = launch.lines * shape.tile * 2 if arch >= 100 else 0  # multiplied from there, on Blackwell
        assert kernel.metadata.shared <= min(launch.shared_bytes(shape) + weights, SHARED[arch])
        if arch < 100 or not is_fp32:  # Triton 3.6 multiplies fp32 on Blackwell number by number
            assert "wgmma.mma_async" in ptx or "mma.sync" in ptx or "tcgen05.mma" in ptx
        if launch.stages > 1 and (arch == 90 or not is_fp32):
            assert "cp.async.cg.shared.global" in ptx and re.search(r"cp\.async\.wait_group\s+[1-9]", ptx)
        if "fp8_e4m3" in (shape.k.format, shape.v.format):  # two at a time, not each in a dozen instructions
            assert bool(re.search(r"cvt\.rn\.b?f16x2\.e4m3x2", ptx)) == (arch >= 89)


# ------------------------------------------------------------------ linear layers
def multiply(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype = BF16, codes: bool = False, bias: bool = False
) -> None:
    some = empty(outputs, dtype=dtype) if bias else None
    if codes:
        packed = linear.pack_coded_linear(Int8Weight.empty(outputs, inputs, torch.get_default_device()), dtype, some)
    else:
        packed = linear.pack_linear(empty(outputs, inputs, dtype=dtype), some)
    packed(empty(rows, inputs, dtype=dtype), wide=bias)


LINEARS: dict[str, Callable[[], None]] = {
    "bf16": lambda: [multiply(rows, 6144, 1024) for rows in (1, 20, 50, 90, 256, 8192)],
    "bf16, parts": lambda: [multiply(rows, 1024, 2048, bias=True) for rows in (1, 30, 60, 128, 600, 8192)],
    "fp16": lambda: [multiply(rows, 4096, 1024, FP16) for rows in (1, 128, 8192)],
    "int8": lambda: [multiply(rows, 4096, 1024, codes=True) for rows in (1, 40, 512, 8192)],
    "int8, parts, fp16": lambda: [multiply(rows, 1024, 2048, FP16, True, True) for rows in (1, 600, 8192)],
    "fp32": lambda: [multiply(rows, 4096, 1024, FP32) for rows in (1, 40, 8192)],
    "fp32, parts": lambda: [multiply(rows, 1024, 1024, FP32, bias=True) for rows in (1, 8192)],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("bf16") else pytest.mark.slow) for name in LINEARS]
)
def test_linear_compiles(name: str, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of rows is multiplied by one instruction, which differs in its rows only; weights come while others
    are multiplied."""
    tiles: list[linear.Tile] = []
    tile_of = linear.tile_of

    def noted(*shape: int) -> tuple[linear.Tile, bool]:
        tiles.append(tile_of(*shape)[0])
        return tile_of(*shape)

    monkeypatch.setattr(linear, "tile_of", noted)
    LINEARS[name]()
    products = [kernel for kernel in launched if kernel.metadata.name == "_multiply"]
    words = "".join(kernel.asm["ptx"] for kernel in products)
    used = re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.\S+", words)
    assert len({re.sub(r"(?<=m64)n\d+", "", each) for each in used}) == 1, set(used)
    for kernel in launched:
        assert kernel.asm["cubin"] and spilled(kernel, tmp_path) <= (0 if kernel.metadata.target.arch == 90 else 64)
    for kernel, tile in zip(products, tiles, strict=True):
        assert re.search(r"cp\.async\.wait_group\s+[1-9]", kernel.asm["ptx"])
        assert kernel.metadata.shared <= tile.shared_bytes


def test_a_linear_of_odd_sizes_compiles(launched: list[Any], tmp_path: Path) -> None:
    multiply(33, 77, 333)
    multiply(1, 1, 1, bias=True)
    assert launched and all(kernel.asm["cubin"] and spilled(kernel, tmp_path) == 0 for kernel in launched)


# ------------------------------------------------------------------ the host
ALL: dict[str, Callable[[], object]] = {
    **LAUNCHES,
    **{f"attention, {name}": make for name, (make, _) in ATTENTION.items()},
    **{f"linear, {name}": make for name, make in LINEARS.items()},
}


@pytest.mark.parametrize("name", ALL)
def test_the_host_never_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a device, as it would where a launcher read what is in a tensor. Those of "meta" hold nothing to be read."""
    launches: list[object] = []
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda *given, **_: launches.append(given))
    for module in (attention, linear):
        monkeypatch.setattr(module, "shared_bytes_of", lambda device: 227 << 10)
    with torch.device("meta"):
        ALL[name]()
    tensors = [each for given in launches for each in given if isinstance(each, torch.Tensor)]
    assert launches and all(each.is_meta for each in tensors)
