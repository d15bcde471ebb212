"""The command `octavo`."""

import difflib
import sys
from collections.abc import Sequence

from server import preflight

USAGE = """\
usage: octavo serve [MODEL] [flags]     serve a model with an OpenAI-compatible API
       octavo serve --help              all flags
       octavo --version

Without MODEL, SmolLM2-135M-Instruct is served. MODEL: a Hugging Face Hub id, a local folder or a .gguf file.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 (the engine died), 2 (could not start) or 130 (Ctrl-C).

    Flags without a command mean `serve`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    refusal = preflight.misplaced_package()
    if refusal is not None:
        return _refuse(refusal)
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0
    if command == "serve":
        return _run_serve(arguments[1:])
    if command.startswith("-"):
        return _run_serve(arguments)
    near = difflib.get_close_matches(command, ["serve", "help"], n=1)
    return _refuse(f"unknown command {command!r}: did you mean 'octavo {near[0] if near else f'serve {command}'}'?")


def _run_serve(arguments: list[str]) -> int:
    """`octavo serve`. The server is imported last: --help and a mistyped flag are answered at once."""
    from configs.errors import StartupError
    from configs.load import load

    try:
        loaded = load(arguments)
        if loaded.print_config:
            print(loaded.describe())
            return 0
        refusal = preflight.foreign_kernels()
        if refusal is not None:
            return _refuse(refusal)
        from server.app import serve

        return serve(loaded.settings)
    except StartupError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:  # argparse's --help and --version
        return int(end.code or 0)


def _refuse(sentence: str) -> int:
    print(f"octavo: {sentence}", file=sys.stderr)
    return 2
