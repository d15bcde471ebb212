"""The two forms of a log, through the real logging module."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from engine.logs import JSONLines, Text, is_json, named

ROOT = Path(__file__).resolve().parents[2]


def written(formatter: logging.Formatter, name: str, message: str, *arguments: object, **options: object) -> str:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger = logging.Logger(name)
    logger.addHandler(handler)
    logger.warning(message, *arguments, **options)  # type: ignore[arg-type]
    return out.getvalue()


def test_json_is_one_object_a_line() -> None:
    line = written(JSONLines(), "octavo.x", "two\nlines of %s", "words", extra={"fields": {"n": 1, "none": None}})
    assert line.count("\n") == 1
    record = json.loads(line)
    assert record.pop("time").endswith("Z") and record == {
        "level": "warning",
        "logger": "octavo.x",
        "message": "two\nlines of words",
        "n": 1,
        "none": None,
    }


def test_an_exception_stays_in_its_line() -> None:
    try:
        raise ValueError("a reason")
    except ValueError:
        line = written(JSONLines(), "octavo.x", "it failed", exc_info=True)
    assert line.count("\n") == 1 and json.loads(line)["exception"].endswith("ValueError: a reason")


def test_what_is_no_json_is_written_as_text() -> None:
    assert json.loads(written(JSONLines(), "x", "m", extra={"fields": {"path": Path("/a")}}))["path"] == "/a"


def test_words_leave_the_fields_out() -> None:
    line = written(Text(), "octavo.x", "all %s", "said", extra={"fields": {"n": 1}})
    assert line.endswith(" WARNING octavo.x: all said\n")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("octavo.x", "octavo.x"),
        ("uvicorn.error", "octavo.uvicorn.error"),
        ("kernels.cpu.library", "octavo.kernels.cpu.library"),
    ],
)
def test_one_prefix_for_all(name: str, shown: str) -> None:
    assert named(name) == shown
    assert json.loads(written(JSONLines(), name, "m"))["logger"] == shown
    assert f" {shown}: m" in written(Text(), name, "m")


def test_auto_is_text_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((Terminal(), False), (io.StringIO(), True)):
        assert is_json("auto", stream) is expected
        assert is_json("json", stream) and not is_json("text", stream)


@pytest.mark.parametrize("log_format", ["auto", "json", "text"])
def test_everything_a_process_logs(log_format: str) -> None:
    code = (
        "import sys, logging, warnings; from engine.logs import configure_logging; configure_logging(*sys.argv[1:])\n"
        "logging.getLogger('octavo.x').info('ours'); logging.getLogger('uvicorn.error').error('theirs')\n"
        "logging.getLogger('uvicorn.error').info('too much')\n"
        "warnings.warn('a warning')"
    )
    command = [sys.executable, "-W", "default", "-c", code, "info", log_format]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert not result.stdout
    if log_format == "text":
        assert " INFO octavo.x: ours\n" in result.stderr and "octavo.py.warnings: " in result.stderr
        assert " ERROR octavo.uvicorn.error: theirs\n" in result.stderr and "too much" not in result.stderr
    else:
        records = [json.loads(line) for line in result.stderr.splitlines()]
        assert [record["logger"] for record in records] == ["octavo.x", "octavo.uvicorn.error", "octavo.py.warnings"]
