"""`octavo doctor`: what it prints, its exit codes; the facts themselves: tests/engine/test_diagnosis.py."""

import json
from collections.abc import Callable

import pytest

from configs.settings import Settings
from configs.version import VERSION
from engine.diagnosis import Diagnosis
from server.cli import main
from server.doctor import USAGE, WIDTH, as_text

Install = Callable[[Diagnosis], list[Settings]]
SECTIONS = {"machine": {"cores": "2 physical", "memory": "much " * 40}, "self-test": {"linear": "exact"}}


@pytest.fixture
def diagnosed(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a diagnosis in the place of ten seconds' work; returns the settings that it was asked for."""

    def install(found: Diagnosis) -> list[Settings]:
        asked: list[Settings] = []
        monkeypatch.setattr("engine.diagnose", lambda settings: asked.append(settings) or found, raising=False)
        monkeypatch.setattr("engine.configure_logging", lambda level, log_format: None, raising=False)
        return asked

    return install


def test_all_is_well(diagnosed: Install, capsys: pytest.CaptureFixture[str]) -> None:
    asked = diagnosed(Diagnosis(SECTIONS))
    assert main(["doctor", "some/model", "--num-threads", "3"]) == 0
    assert (asked[0].model, asked[0].num_threads) == ("some/model", 3)
    out = capsys.readouterr().out
    assert out.startswith(f"Octavo {VERSION}\n\nmachine\n  cores   2 physical\n  memory  much ")
    assert out.endswith("\n\nself-test\n  linear  exact\n\nAll is well.\n")


def test_problems(diagnosed: Install, capsys: pytest.CaptureFixture[str]) -> None:
    diagnosed(Diagnosis(SECTIONS, ["There are no kernels.", "A long story. " * 20]))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEMS\n  * There are no kernels.\n  * A long story. " in out and "All is well" not in out
    assert max(map(len, out.splitlines())) <= WIDTH


def test_json(diagnosed: Install, capsys: pytest.CaptureFixture[str]) -> None:
    for problems, code in (([], 0), (["A problem."], 1)):
        diagnosed(Diagnosis(SECTIONS, problems))
        assert main(["doctor", "--json"]) == code
        report = json.loads(capsys.readouterr().out)
        assert report == {"octavo": VERSION, "ok": not problems, "problems": problems, **SECTIONS}


def test_words_longer_than_a_line_stay_whole() -> None:
    path = "/a" * 60
    assert path in as_text({"x": {"p": path}}, [])


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["m", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 0
    assert capsys.readouterr().out == USAGE and max(map(len, USAGE.splitlines())) <= WIDTH


def test_unknown_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--jsn"]) == 2
    assert capsys.readouterr().err.startswith("octavo: unknown flag --jsn")


@pytest.mark.slow
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert {"machine", "versions", "kernels", "model and KV cache", "Hugging Face Hub", "self-test"} <= report.keys()
