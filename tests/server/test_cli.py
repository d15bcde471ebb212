"""The command: what it prints, its exit codes, and what it does not import."""

import os
import runpy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import published_models
import pytest

from configs.errors import SettingsError, StartupError
from configs.settings import Settings
from configs.version import VERSION
from server.cli import main

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "fastapi", "starlette", "uvicorn", "zmq", "tokenizers", "numpy", "engine")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OCTAVO_"):
            monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Settings], int]], list[Settings]]:
    """Puts a function in the place of `server.app.serve` and returns the list of settings it was called with."""

    def install(answer: Callable[[Settings], int]) -> list[Settings]:
        calls: list[Settings] = []

        def serve(settings: Settings) -> int:
            calls.append(settings)
            return answer(settings)

        module = types.ModuleType("server.app")
        module.serve = serve  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "server.app", module)
        return calls

    return install


def python(*arguments: str, cwd: Path = ROOT, path: list[Path] | None = None) -> subprocess.CompletedProcess[str]:
    """`path`: folders in front of the repository root on PYTHONPATH."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, [*(path or []), ROOT]))
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60
    )


def assert_refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2, result
    assert result.stderr.startswith("octavo: ") and result.stderr.count("\n") == 1, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


# ---------------------------------------------------------------- commands
def test_serve_gets_the_settings_and_gives_the_exit_code(served):
    calls = served(lambda settings: 7)
    assert main(["serve", "some/model", "--port", "9001", "--max_model_len=4k"]) == 7
    [settings] = calls
    assert (settings.model, settings.port, settings.max_model_len) == ("some/model", 9001, 4000)


def test_without_a_command_usage_and_exit_code_2(served, capsys: pytest.CaptureFixture[str]):
    calls = served(lambda settings: 0)
    assert main([]) == 2 and not calls
    captured = capsys.readouterr()
    assert captured.err.startswith("usage: octavo serve [MODEL] [flags]") and not captured.out


@pytest.mark.parametrize("argv", [["--port", "8000"], ["--port=8000"], ["--print-config"], ["-x"]])
def test_a_flag_in_place_of_the_command(argv: list[str], served, capsys: pytest.CaptureFixture[str]):
    calls = served(lambda settings: 0)
    assert main(argv) == 2 and not calls
    error = capsys.readouterr().err
    assert error == f"octavo: a command comes before {argv[0]}: octavo serve {argv[0]} (see octavo help).\n"


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 0
    assert "octavo serve [MODEL] [flags]" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["serve", "--help"], ["serve", "m", "-h"]])
def test_help_of_serve(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 0
    assert "--max-model-len" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--version"], ["serve", "--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 0
    assert capsys.readouterr().out == f"octavo {VERSION}\n"


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("run", "there are 'serve', 'plan', 'doctor', 'calibrate', 'bench' and 'help'."),
        ("chat", "there are 'serve', 'plan', 'doctor', 'calibrate', 'bench' and 'help'."),
        # a folder here, and no model for that:
        ("configs", "there are 'serve', 'plan', 'doctor', 'calibrate', 'bench' and 'help'."),
        ("sevre", "there are 'serve', 'plan', 'doctor', 'calibrate', 'bench' and 'help': did you mean 'octavo serve'?"),
        ("Serve", "there are 'serve', 'plan', 'doctor', 'calibrate', 'bench' and 'help': did you mean 'octavo serve'?"),
        ("plna", "there are 'serve', 'plan', 'doctor', 'calibrate', 'bench' and 'help': did you mean 'octavo plan'?"),
        ("hlep", "there are 'serve', 'plan', 'doctor', 'calibrate', 'bench' and 'help': did you mean 'octavo help'?"),
        ("org/model", "a model is served by 'octavo serve org/model'."),
        ("m.gguf", "a model is served by 'octavo serve m.gguf'."),
    ],
)
def test_unknown_command(word: str, end: str, capsys: pytest.CaptureFixture[str]):
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"octavo: unknown command '{word}'") and error.endswith(f"{end}\n")
    assert error.count("\n") == 1


def test_print_config_starts_nothing(served, capsys: pytest.CaptureFixture[str]):
    calls = served(lambda settings: 0)
    assert main(["serve", "--port", "1", "--print-config"]) == 0
    assert "port: 1  # --port" in capsys.readouterr().out and calls == []


# ---------------------------------------------------------------- ends
def test_wrong_settings(served, capsys: pytest.CaptureFixture[str]):
    calls = served(lambda settings: 0)
    assert main(["serve", "--prot", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "octavo: unknown flag --prot: did you mean '--port'?\n" and not captured.out and not calls


@pytest.mark.parametrize("kind", [StartupError, SettingsError])
def test_start_up_error(kind: type[StartupError], served, capsys: pytest.CaptureFixture[str]):
    def fail(settings: Settings) -> int:
        raise kind("port 8000 is in use: choose another with --port.")

    served(fail)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "octavo: port 8000 is in use: choose another with --port.\n"


def test_keyboard_interrupt(served):
    def interrupt(settings: Settings) -> int:
        raise KeyboardInterrupt

    served(interrupt)
    assert main(["serve"]) == 130


def test_a_bug_is_not_hidden(served):
    served(lambda settings: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


# ---------------------------------------------------------------- as a process
@pytest.mark.parametrize("word", [[], ["serve"]], ids=["short", "with the word"])
@pytest.mark.parametrize(
    ("argv", "settings"),
    [
        ([], Settings()),
        (["--port", "9000"], Settings(port=9000)),
        (["org/model"], Settings(model="org/model")),
        (["help"], Settings(model="help")),
        (["--port", "9000", "org/model"], Settings(model="org/model", port=9000)),
    ],
)
def test_python_m_server_is_octavo_serve(
    argv: list[str], settings: Settings, word: list[str], served, monkeypatch: pytest.MonkeyPatch
):
    calls = served(lambda settings: 3)
    monkeypatch.setattr(sys, "argv", ["server", *word, *argv])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("server", run_name="__main__")
    assert end.value.code == main(["serve", *argv]) == 3
    assert calls == [settings, settings]


def test_python_m_server_answers_as_octavo_serve():
    assert python("-m", "server", "--version").stdout == f"octavo {VERSION}\n"
    assert "port: 9  # --port" in python("-m", "server", "--port", "9", "--print-config").stdout
    assert "--max-model-len" in python("-m", "server", "--help").stdout
    assert_refused(python("-m", "server", "--port", "x"), "--port", "'x'")
    assert_refused(python("-m", "server", "serve", "--port", "x"), "--port", "'x'")


ANSWERS = [
    ["--help"],
    ["serve", "--help"],
    ["serve", "--version"],
    ["serve", "--print-config"],
    ["calibrate", "--help"],
    ["bench", "--help"],
]


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("argv", [*ANSWERS, ["plan", "MODEL"]])
def test_where_what_is_said_cannot_go(argv: list[str], unbuffered: bool, tmp_path: Path):
    """Nobody who reads is no fault, as in `octavo plan MODEL | head`; a full disk is one sentence."""
    model = str(published_models.write(tmp_path, "Llama-2-7B"))
    code = f"import sys, server.cli; sys.exit(server.cli.main({[model if a == 'MODEL' else a for a in argv]!r}))"
    command = [sys.executable, *["-u"] * unbuffered, "-c", code]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for stdout, code, stderr in (
        (writer, 0, ""),
        (full, 2, "octavo: stdout cannot be written: No space left on device.\n"),
    ):
        result = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
        )
        os.close(stdout)
        assert (result.returncode, result.stderr) == (code, stderr)


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["serve", "--help"],
        ["serve", "--version"],
        ["serve", "--print-config"],
        ["serve", "--prot"],
        ["plan", "--help"],
        ["plan", "--gpu", "many"],
        ["bench", "--help"],
        ["bench"],
    ],
)
def test_quick_answers_import_nothing_heavy(argv: list[str]):
    code = f"import sys, server.cli; server.cli.main({argv!r}); print([m for m in {HEAVY!r} if m in sys.modules])"
    result = python("-c", code)
    assert result.stdout.splitlines()[-1] == "[]", result


# ---------------------------------------------------------------- preflight
@pytest.mark.parametrize("name", ["configs", "engine", "kernels"])
@pytest.mark.parametrize("as_package", [True, False], ids=["package", "module"])
def test_a_package_of_the_users_in_our_place(name: str, as_package: bool, tmp_path: Path):
    wrong = tmp_path / name if as_package else tmp_path / f"{name}.py"
    if as_package:
        wrong.mkdir()
        (wrong / "__init__.py").touch()
    else:
        wrong.touch()
    # server itself comes from where it belongs, the user's folder is in front, as with `python -m server` there
    for argv in (["--version"], ["serve"], ["--port", "1"]):
        code = f"import server.cli, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.exit(server.cli.main({argv!r}))"
        assert_refused(python("-c", code), str(wrong), f"'{name}'", str(ROOT))


def test_python_m_server_in_a_folder_with_its_own_configs(tmp_path: Path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()
    assert_refused(python("-m", "server", "serve", cwd=tmp_path), str(tmp_path / "configs"))


def test_a_folder_that_is_no_package_does_no_harm(tmp_path: Path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").touch()
    assert python("-m", "server", "--version", cwd=tmp_path).returncode == 0


def test_a_missing_package(tmp_path: Path):
    (tmp_path / "server").symlink_to(ROOT / "server")
    code = f"import sys; sys.path[:] = [{str(tmp_path)!r}] + [p for p in sys.path if p not in ('', {str(ROOT)!r})]"
    code += "; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]"
    code += "; import server.cli; sys.exit(server.cli.main(['--version']))"
    assert_refused(python("-I", "-c", code), "'configs'", "missing")


def test_hugging_faces_kernels_beside_ours(tmp_path: Path):
    metadata = tmp_path / "kernels-0.10.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.10.1\n")
    assert_refused(python("-m", "server", "serve", path=[tmp_path]), "'kernels' 0.10.1", "uninstall")
    assert python("-m", "server", "--version", path=[tmp_path]).returncode == 0
