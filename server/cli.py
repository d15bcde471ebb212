"""The command `octavo`."""

import contextlib
import difflib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from server import preflight

COMMANDS = ("serve", "plan", "doctor", "calibrate", "bench", "help")
USAGE = """\
usage: octavo serve [MODEL] [flags]     serve a model with an OpenAI-compatible API
       octavo serve --help              all flags
       octavo plan MODEL [flags]        what a model takes of memory, and what fits
       octavo doctor [MODEL] [flags]    look at this machine and try it out
       octavo calibrate [MODEL] --out FILE [flags]
                                        find scales for a smaller KV cache
       octavo bench URL [--compare URL] [flags]
                                        how fast a running server is
       octavo help                      this text (also octavo --help)
       octavo --version

Without MODEL, SmolLM2-135M-Instruct is served. MODEL: a Hugging Face Hub id, a local folder or a .gguf file.
python -m server [MODEL] [flags] is the same as octavo serve [MODEL] [flags].
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 (the engine died, the doctor found something, what was
    planned does not fit, or a request of the bench failed), 2 (could not start) or 130 (Ctrl-C).

    A command is always named: nothing is served because a word was forgotten.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    refusal = preflight.misplaced_package()
    if refusal is not None:
        return _refuse(refusal)
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        return 2
    command = arguments[0]
    if command in ("--help", "-h", "help"):
        return _guarded(_help, arguments[1:])
    if command == "serve":
        return _guarded(_serve, arguments[1:])
    if command == "plan":
        return _guarded(_plan, arguments[1:])
    if command == "doctor":
        return _guarded(_doctor, arguments[1:])
    if command == "calibrate":
        return _guarded(_calibrate, arguments[1:])
    if command == "bench":
        return _guarded(_bench, arguments[1:])
    if command == "--version":
        return _guarded(_serve, arguments[:1])
    return _refuse(_unknown(command))


def _unknown(command: str) -> str:
    """What to type instead of a first word that is no command."""
    if command.startswith("-"):
        return f"a command comes before {command}: octavo serve {command} (see octavo help)."
    if "/" in command or command.endswith(".gguf"):
        return f"unknown command {command!r}: a model is served by 'octavo serve {command}'."
    near = difflib.get_close_matches(command.lower(), COMMANDS, n=1)
    hint = f": did you mean 'octavo {near[0]}'?" if near else "."
    return f"unknown command {command!r}, there are {', '.join(map(repr, COMMANDS[:-1]))} and {COMMANDS[-1]!r}{hint}"


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """What is printed inside reaches stdout at the end, in one piece. That nobody reads on (`| head`) is no fault; a
    full disk is. Raises `StartupError`."""
    from configs.errors import StartupError

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    finally:
        try:
            print(said.getvalue(), end="", flush=True)
        except OSError as error:
            with contextlib.suppress(OSError):  # else the interpreter would try again when it ends, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                raise StartupError(f"stdout cannot be written: {error.strerror}.") from None


@_printing()
def _help(arguments: list[str]) -> int:
    print(USAGE, end="")
    return 0


def _serve(arguments: list[str]) -> int:
    """`octavo serve`. The server is imported last: --help and a mistyped flag are answered at once."""
    from configs.load import load

    with _printing():
        loaded = load(arguments)
        if loaded.print_config:
            print(loaded.describe())
            return 0
    refusal = preflight.foreign_kernels()
    if refusal is not None:
        return _refuse(refusal)
    from server.app import serve

    return serve(loaded.settings)


@_printing()
def _plan(arguments: list[str]) -> int:
    """`octavo plan`. Nothing is loaded or served, so a foreign `kernels` does no harm."""
    from server.plan import run

    return run(arguments)


@_printing()
def _doctor(arguments: list[str]) -> int:
    refusal = preflight.foreign_kernels()
    if refusal is not None:
        return _refuse(refusal)
    from server.doctor import run

    return run(arguments)


@_printing()
def _calibrate(arguments: list[str]) -> int:
    refusal = preflight.foreign_kernels()
    if refusal is not None:
        return _refuse(refusal)
    from server.calibrate import run

    return run(arguments)


@_printing()
def _bench(arguments: list[str]) -> int:
    """`octavo bench`. It is a client: nothing is served or loaded here."""
    from server.bench.command import run

    return run(arguments)


def _guarded(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """What went wrong becomes a sentence, and how it ended an exit code."""
    from configs.errors import StartupError

    try:
        return command(arguments)
    except StartupError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:  # argparse's --help and --version
        return int(end.code or 0)


def _refuse(sentence: str) -> int:
    print(f"octavo: {sentence}", file=sys.stderr)
    return 2
