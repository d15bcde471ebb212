"""`octavo calibrate`: from the command line to a file that serves."""

import os
import shlex
from pathlib import Path

import pytest
import tiny_models

from configs.load import load
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
    return tiny_models.build(tmp_path / "my model", tiny_models.TinyModel(head_dim=32))


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
    flags = f"--dtype float32 --kv-cache-dtype fp8 --kv-cache-scales {out} --device cpu --num-threads 1"
    assert command == f"  octavo serve '{folder}' {flags}"
    with LLM(
        str(folder),
        kv_cache_dtype="fp8_e4m3",
        kv_cache_scales=str(out),
        dtype="float32",
        num_gpu_blocks_override=32,
        max_num_seqs=4,
    ) as llm:
        assert (
            llm.info.summary["KV format"] == f"fp8_e4m3 (scales of {out}); 256 bytes a token, 25.0 % of what fp32 takes"
        )


def test_own_flags(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text", tmp_path / "scales"
    text.write_text("a text " * 100)
    argv = [str(folder), f"--text={text}", "--granularity", "tensor", "--kv-cache-dtype-v", "fp8", "--out", str(out)]
    assert main(["calibrate", *argv, *FLAGS]) == 0
    said = capsys.readouterr().out
    assert "from 70" in said and "--kv-cache-dtype int8 --kv-cache-dtype-v fp8 --kv-cache-scales" in said


def test_the_command_means_the_same_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was said, and however, except for secrets."""
    out, config = tmp_path / "my scales", tmp_path / "config.yaml"
    config.write_text("max-model-len: 256\n")
    monkeypatch.setenv("OCTAVO_TOKENIZER", str(folder))
    argv = [str(folder), "--config", str(config), "--trust-remote-code", "--no-enable-prefix-caching"]
    argv += ["--kv-cache-dtype-v", "int4", "--kv-cache-dtype-skip-layers", "0", "sliding_window", "--api-key=secret"]
    assert main(["calibrate", *argv, "--out", str(out), *FLAGS]) == 0
    monkeypatch.delenv("OCTAVO_TOKENIZER")
    said = capsys.readouterr().out
    program, command, *words = shlex.split(said.splitlines()[-1])
    assert (program, command) == ("octavo", "serve") and "secret" not in said
    expected = load(
        [*argv, "--tokenizer", str(folder), "--kv-cache-dtype", "int8", "--kv-cache-scales", str(out), *FLAGS]
    )
    assert load(words).settings == expected.settings.model_copy(update={"api_key": ()})


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
    assert "to be int4: use --kv-cache-dtype int8" in refusal(
        capsys, model, "--out", out, "--kv-cache-dtype", "int4", *FLAGS
    )
    assert not Path(out).exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no such model: whoever looked for it first would say so."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in (tmp_path, Path("/dev/null"), Path("/proc/x.st"), tmp_path / "fifo", tmp_path / "loop"):
        assert f"--out {out} cannot be written: " in refusal(capsys, "/no/model", "--out", str(out))
    assert "--out FILE is needed" in refusal(capsys, "/no/model", "--out", "")


def test_trying_to_write_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    old.write_text("kept")
    link.symlink_to(new)
    for out in (old, new, link):
        assert "/no/model" in refusal(capsys, "/no/model", "--out", str(out))
    assert old.read_text() == "kept" and not new.exists() and link.is_symlink()
