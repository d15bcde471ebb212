"""Compiling and loading the native library."""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build, library

ROOT = Path(__file__).parents[2]

SOURCE = """
#include "answer.h"
extern "C" int octavo_cpu_isas() { return 3; }
extern "C" int octavo_answer() { return ANSWER; }
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A small library in place of ours."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "main.cpp").write_text(SOURCE)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def compiler():
    try:
        return build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


def test_compiled_once_and_again_when_a_source_changes(sources, compiler, tmp_path):
    cache = tmp_path / "cache"
    first = build.cached_library(cache)
    built = first.stat().st_mtime_ns
    assert build.cached_library(cache) == first
    assert first.stat().st_mtime_ns == built
    assert ctypes.CDLL(str(first)).octavo_answer() == 42
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    second = build.cached_library(cache)
    assert second != first
    assert ctypes.CDLL(str(second)).octavo_answer() == 43
    assert sorted(cache.iterdir()) == sorted([first, second])  # nothing temporary is left


def test_an_installed_library_of_these_sources_comes_first(sources, tmp_path, monkeypatch):
    installed = tmp_path / f"liboctavo-{build.source_key()}.so"
    monkeypatch.setattr(library, "installed_library", lambda: installed)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        library.find_library(tmp_path / "cache")
    installed.touch()
    assert library.find_library(tmp_path / "cache") == installed


def test_a_source_for_an_instruction_set_gets_its_flags(sources, compiler, tmp_path):
    assert build.source_isa(Path("attention_avx512bf16.cpp")) == "avx512bf16"
    assert build.source_isa(Path("store.cpp")) == build.source_isa(Path("copy_blocks.cpp")) == "baseline"
    (sources / "main_avx2.cpp").write_text('extern "C" int octavo_wide_avx2() { return __AVX2__ + __FMA__; }')
    handle = ctypes.CDLL(str(build.cached_library(tmp_path / "cache")))
    loaded = library.NativeLibrary(Path("a.so"), handle, ("baseline", "avx2"))
    if loaded.refusal("wide", "avx2") is None:
        assert loaded.function("wide_avx2", [], ctypes.c_int)() == 2
    assert loaded.refusal("wide", "baseline") == "the compiler that built a.so has no portable"
    assert loaded.refusal("wide", "amx") == "this CPU or its operating system has no AMX bf16"


def test_errors_are_one_sentence(sources, compiler, tmp_path, monkeypatch):
    (sources / "main.cpp").write_text("int main( {")
    with pytest.raises(build.BuildError, match=r"failed: .*main\.cpp:1.* error"):
        build.cached_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match="cannot write"):
        build.cached_library(tmp_path / "file")
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(
        build.BuildError,
        match="no C\\+\\+ compiler \\(no-such-compiler\\) on this machine; install no-such-compiler and",
    ):
        build.cached_library(tmp_path / "cache")


def test_two_processes_build_at_once(sources, compiler, tmp_path):
    script = (
        "import ctypes, pathlib, sys; from kernels.cpu import build; build.SOURCES = pathlib.Path(sys.argv[1]);"
        "print(ctypes.CDLL(str(build.cached_library(pathlib.Path(sys.argv[2])))).octavo_answer())"
    )
    command = [sys.executable, "-c", script, str(sources), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in running] == ["42\n"] * 3
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_without_a_compiler_torch_serves_and_says_why(tmp_path):
    script = (
        "import torch; from kernels.cpu import library; from kernels.registry import choose;"
        "library.installed_library = lambda: library.Path('/nowhere.so');"
        "print(library.load(), choose('paged_attention', 'cpu', torch.bfloat16))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stdout.startswith("None paged_attention: torch reference (not C++ AMX bf16: no C++ compiler")
    [warning] = result.stderr.splitlines()
    assert warning == (
        "No native kernels: no C++ compiler (g++, c++, clang++) on this machine; install g++ and start again. "
        "Slow torch code serves instead."
    )


def test_setup_without_a_compiler_does_not_fail(tmp_path):
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("no setuptools here; pip brings its own")
    python = Path(sys.executable)
    result = subprocess.run(
        [python, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")],
        cwd=ROOT,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "no native kernels in this build" in result.stdout + result.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_build_needs_no_torch():
    script = "import sys; import kernels.cpu.build; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


needs_library = pytest.mark.skipif(library.load() is None, reason=str(library.refusal()))


@needs_library
def test_this_cpu_is_known():
    found = library.load()
    assert found is not None
    assert found.cpu_isas[0] == "baseline"
    assert found.isa in library.ISAS
    flags = Path("/proc/cpuinfo").read_text()
    for isa, flag in (("avx2", "avx2"), ("avx512", "avx512dq"), ("avx512bf16", "avx512_bf16"), ("amx", "amx_bf16")):
        assert (isa in found.cpu_isas) == (f" {flag} " in flags.replace("\n", " ")), isa


@needs_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_instruction_sets_share_no_code():
    """Only C entries are visible, and no function occurs in two objects for the linker to choose from."""
    found = library.load()
    assert found is not None
    output = subprocess.run(["nm", "-D", found.path], capture_output=True, text=True, check=True).stdout
    symbols = [line.split() for line in output.splitlines()]
    defined = {parts[2] for parts in symbols if len(parts) == 3}
    assert {name for name in defined if not name.startswith("octavo_")} <= {"_init", "_fini"}
    assert not [parts for parts in symbols if len(parts) == 3 and parts[1] in "WVu"]
