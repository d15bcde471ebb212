"""`octavo calibrate`: from the command line to a file that serves."""

from pathlib import Path

import pytest
import tiny_models

from engine import LLM
from server.calibrate import DESCRIPTION
from server.cli import main

FLAGS = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1"]


@pytest.fixture(autouse=True)
def no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the whole test process stays as it is."""
    monkeypatch.setattr("engine.configure_logging", lambda level, log_format: None, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.build(tmp_path / "model")


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["calibrate", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo: ") and error.endswith(".\n") and error.count("\n") == 1
    return error


def test_a_file_that_serves(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scales.safetensors"
    assert main(["calibrate", str(folder), "--out", str(out), "--kv-cache-dtype=fp8", *FLAGS]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: scales of 2 layers, from ") and "tokens. To serve with them:" in said
    command = said.splitlines()[-1]
    assert command == f"  octavo serve {folder} --kv-cache-dtype fp8_e4m3 --kv-cache-scales {out}"
    with LLM(
        str(folder),
        kv_cache_dtype="fp8_e4m3",
        kv_cache_scales=str(out),
        dtype="float32",
        num_gpu_blocks_override=32,
        max_num_seqs=4,
    ) as llm:
        assert (
            llm.info.summary["KV format"] == f"fp8_e4m3 (scales of {out}); 128 bytes a token, 25.0 % of what fp32 takes"
        )


def test_own_flags(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text", tmp_path / "scales"
    text.write_text("a text " * 100)
    argv = [str(folder), f"--text={text}", "--granularity", "tensor", "--kv-cache-dtype-v", "fp8", "--out", str(out)]
    assert main(["calibrate", *argv, *FLAGS]) == 0
    said = capsys.readouterr().out
    assert "from 70" in said and "--kv-cache-dtype int8 --kv-cache-dtype-v fp8_e4m3 --kv-cache-scales" in said


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["m", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *argv]) == 0
    assert capsys.readouterr().out == DESCRIPTION and max(map(len, DESCRIPTION.splitlines())) <= 80


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = str(folder), str(tmp_path / "scales")
    assert "--out FILE is needed" in refusal(capsys, model)
    assert "--out" in refusal(capsys, model, "--out")
    assert f"there is no folder {tmp_path / 'no'}" in refusal(capsys, model, "--out", str(tmp_path / "no" / "scales"))
    assert "--granularity" in refusal(capsys, model, "--out", out, "--granularity", "head")
    assert "unknown flag --txt" in refusal(capsys, model, "--out", out, "--txt", "x")
    assert "int4 has none" in refusal(capsys, model, "--out", out, "--kv-cache-dtype", "int4", *FLAGS)
    assert not Path(out).exists()
