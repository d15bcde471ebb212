"""Other people's tools against the real command, each in an environment of its own: their pins exclude one another.

    OCTAVO_E2E_ENVS=FOLDER    keeps the environments there and uses those it finds (default: made anew, thrown away)
    OCTAVO_E2E_VLLM=COMMAND   a `vllm` (0.32 was tried), which takes gigabytes and is not installed here

The tools get a local tokenizer and a Hub address at which nobody answers: none of them needs the Hub.
"""

import os
import subprocess
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import Served, serving
from smollm2 import smollm2_gguf
from tiny_models import quiet

INSTALL_SECONDS = 3600
TOOL_SECONDS = 1200
LINES, LINE = 200, 400
"""Of a failed tool's output, and characters of each, that are shown."""
NOBODY = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(name, requirement) -> the `bin` folder of an environment that has it."""
    kept = os.environ.get("OCTAVO_E2E_ENVS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("environments")

    def make(name: str, requirement: str) -> Path:
        binaries = folder / name / "bin"
        if not (binaries / name).exists():
            venv.create(folder / name, with_pip=True, clear=True)
            install = [binaries / "python", "-m", "pip", "install", "--quiet", requirement]
            done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS)
            assert done.returncode == 0, done.stderr[-4000:]
        return binaries

    return make


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The default model, as `octavo serve` without arguments serves it."""
    smollm2_gguf()  # skips where it cannot be had
    with serving(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's tokenizer as a folder, which the tools take for a Hub id."""
    path = smollm2_gguf()
    folder = tmp_path_factory.mktemp("tokenizer")
    with quiet():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs a tool in an empty folder and returns what it printed; its exit code must be 0."""

    def call(*command: str | Path, **environ: str) -> str:
        done = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **NOBODY, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TOOL_SECONDS,
        )
        lines = [line[:LINE] for line in done.stdout.splitlines()[-LINES:]]
        assert done.returncode == 0, "\n".join(lines)
        return done.stdout

    return call
