"""`octavo calibrate`: finds scales for a model's keys and values and writes them to a file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from configs.errors import SettingsError
from configs.load import load
from configs.settings import Settings
from server.banner import Progress

DESCRIPTION = """\
usage: octavo calibrate [MODEL] --out FILE [--text FILE]
                        [--granularity channel|tensor] [flags of octavo serve]

Reads a text with MODEL, notes how large its keys and values become, and writes
scales to FILE (safetensors), for octavo serve --kv-cache-scales FILE. They are
for --kv-cache-dtype int8, or fp8 if that is given.

  --out FILE       Where to write. Needed.
  --text FILE      A text like those that will be served, in UTF-8. Without it:
                   a text of 2,500 tokens, prose, code and tables.
  --granularity    channel: a scale for each head and dim. tensor: one for a
                   layer's keys and one for its values. (default: channel)
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message.removeprefix('argument ')}; see octavo calibrate --help.")


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises `StartupError`."""
    if any(argument in ("--help", "-h") for argument in arguments):
        print(DESCRIPTION, end="")
        return 0
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out")
    parser.add_argument("--text")
    parser.add_argument("--granularity", choices=("channel", "tensor"), default="channel")
    own, rest = parser.parse_known_args(list(arguments))
    if own.out is None:
        raise SettingsError("--out FILE is needed, to say where the scales go; see octavo calibrate --help.")
    out = Path(own.out)
    if not out.parent.is_dir():
        raise SettingsError(f"--out {out} cannot be written: there is no folder {out.parent}.")
    return _calibrate(load(rest).settings, out, None if own.text is None else Path(own.text), own.granularity)


def _calibrate(settings: Settings, out: Path, text: Path | None, granularity: str) -> int:
    from engine import calibrate, configure_logging

    configure_logging(settings.log_level, settings.log_format)
    progress = Progress(sys.stderr)
    try:
        scales = calibrate(settings, text, "tensor" if granularity == "tensor" else "channel", progress.report)
    finally:
        progress.close()
    scales.save(out)
    k_format, v_format = (format.value for format in scales.formats)
    flags = f"--kv-cache-dtype {k_format}" + (f" --kv-cache-dtype-v {v_format}" if v_format != k_format else "")
    model = "" if settings.model is None else f" {settings.model}"
    print(f"{out}: scales of {len(scales.layers)} layers, from {scales.num_tokens} tokens. To serve with them:\n")
    print(f"  octavo serve{model} {flags} --kv-cache-scales {out}")
    return 0
