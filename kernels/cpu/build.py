"""Compiles `csrc/*.cpp` into one shared library with a plain C ABI. No torch: `setup.py` loads this file too.

Every source is compiled for the instruction set that its name ends in (`attention_avx2.cpp`; no such ending: baseline),
so one library serves all machines of an architecture and the loader picks by cpuid. Two rules for the sources follow:
all code of an `_ISA` file has internal linkage apart from its `extern "C"` entries (the linker keeps one of several
equal inline functions, and it must not be the AVX-512 one), and results never depend on what the compiler contracts
(-ffp-contract=off; a fused multiply-add is written as one).

Threads are the library's own (`csrc/threads.cpp`).
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"

COMPILERS = ("g++", "c++", "clang++")

FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-math-errno"),
    "-fno-trapping-math",  # nobody looks at the exception flags, and choices inside a loop may become vectors
)

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")

ISA_FLAGS = {
    "baseline": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
}
"""Instruction sets by the ending of a source's name, weakest first. All but the baseline are x86-64."""


class BuildError(Exception):
    """No library. The message is a reason in words."""


def source_key() -> str:
    """Names what a library was made from: sources and flags."""
    digest = hashlib.sha256(repr((FLAGS, ISA_FLAGS, platform.machine())).encode())
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def installed_library() -> Path:
    """Where `setup.py` puts the library of these very sources. An older one has another name and is never loaded."""
    return Path(__file__).parent / f"liboctavo-{source_key()}.so"


def cached_library(cache: Path) -> Path:
    """The library in folder `cache`, compiled first if need be. Raises BuildError."""
    compiler = find_compiler()
    key = hashlib.sha256((source_key() + compiler_version(compiler)).encode()).hexdigest()[:16]
    library = cache / f"liboctavo-{key}.so"
    if not library.exists():
        log.warning("Compiling the native kernels into %s (once; some 20 seconds).", cache)
        compile_library(library, compiler)
    return library


def find_compiler() -> str:
    """Path of a C++ compiler. Raises BuildError."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(
        f"no C++ compiler ({', '.join(COMPILERS)}) on this machine; install {COMPILERS[0]} and start again"
    )


def compiler_version(compiler: str) -> str:
    return _run([compiler, "--version"]).splitlines()[0]


def compile_library(target: Path, compiler: str) -> None:
    """Compiles all sources and moves the library to `target` in one step: a reader sees all of it or nothing, however
    many processes build at once. Raises BuildError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
            objects = _compile_objects(Path(folder), compiler)
            library = Path(folder) / target.name
            _run([compiler, "-shared", "-pthread", "-o", str(library), *map(str, objects)])
            os.replace(library, target)
    except OSError as error:
        raise BuildError(f"cannot write {target}: {error}") from error


def _compile_objects(folder: Path, compiler: str) -> list[Path]:
    """One object a source. Sources for instruction sets that this compiler or architecture lacks are left out."""
    flags = {isa: isa_flags for isa, isa_flags in ISA_FLAGS.items() if _understands(compiler, isa, isa_flags)}
    sources = [source for source in sorted(SOURCES.glob("*.cpp")) if source_isa(source) in flags]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        _run([compiler, *FLAGS, *flags[source_isa(source)], "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def source_isa(source: Path) -> str:
    """The instruction set that a source is compiled for."""
    ending = source.stem.rpartition("_")[2]
    return ending if ending in ISA_FLAGS else "baseline"


def _understands(compiler: str, isa: str, flags: tuple[str, ...]) -> bool:
    if isa == "baseline":
        return True
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        _run([compiler, *flags, "-E", "-x", "c++", "/dev/null"])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines() or [""]
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0].strip()}")
    return result.stdout
