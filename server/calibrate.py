"""`octavo calibrate`: finds scales for a model's keys and values and writes them to a file."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import SettingsError
from configs.load import FlagParser, load
from configs.settings import SECRET_FIELDS, Settings, flag
from server.banner import Progress

DESCRIPTION = """\
usage: octavo calibrate [MODEL] --out FILE [--text FILE]
                        [--granularity channel|tensor] [flags of octavo serve]

Reads a text with MODEL, notes how large its keys and values become, and writes
scales to FILE (safetensors), for octavo serve --kv-cache-scales FILE. They are
for --kv-cache-dtype int8, or fp8 if that is given; with --kv-cache-dtype-v int4
the file serves keys alone.

  --out FILE       Where to write. Needed.
  --text FILE      A text like those that will be served, in UTF-8. Without it:
                   a text of 2,500 tokens, prose, code and tables.
  --granularity    channel: a scale for each head and dim. tensor: one for a
                   layer's keys and one for its values. (default: channel)
"""


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises `StartupError`."""
    if any(argument in ("--help", "-h") for argument in arguments):
        print(DESCRIPTION, end="")
        return 0
    parser = FlagParser(prog="octavo calibrate", add_help=False, allow_abbrev=False)
    parser.add_argument("--out")
    parser.add_argument("--text")
    parser.add_argument("--granularity", choices=("channel", "tensor"), default="channel")
    own, rest = parser.parse_known_args(list(arguments))
    if not own.out:
        raise SettingsError("--out FILE is needed, to say where the scales go; see octavo calibrate --help.")
    settings, out = load(rest).settings, Path(own.out)
    check_writable("--out", out)
    return _calibrate(settings, out, None if own.text is None else Path(own.text), own.granularity)


def check_writable(name: str, out: Path) -> None:
    """Before minutes are spent on what goes there. Leaves what is there as it is. name: of the flag. Raises
    `SettingsError`."""
    file = Path(os.path.realpath(out))
    try:
        if not file.parent.is_dir():
            raise SettingsError(f"{name} {out} cannot be written: there is no folder {out.parent}.")
        was_there = file.exists()
        if was_there and not file.is_file():
            raise SettingsError(f"{name} {out} cannot be written: it is there, and no regular file.")
        file.open("ab").close()
        if not was_there:
            file.unlink()
    except OSError as error:
        raise SettingsError(f"{name} {out} cannot be written: {error.strerror}.") from None


def _calibrate(settings: Settings, out: Path, text: Path | None, granularity: str) -> int:
    from engine import calibrate, configure_logging

    configure_logging(settings.log_level, settings.log_format)
    progress = Progress(sys.stderr)
    try:
        scales = calibrate(settings, text, "tensor" if granularity == "tensor" else "channel", progress.report)
    finally:
        progress.close()
    scales.save(out)
    print(f"{out}: scales of {len(scales.layers)} layers, from {scales.num_tokens} tokens. To serve with them:\n")
    changes = {"kv_cache_scales": str(out)}
    if settings.kv_cache_dtype == "auto":
        changes["kv_cache_dtype"] = scales.formats[0].value
    print(f"  {_command(settings.model_copy(update=changes))}")
    return 0


def _command(settings: Settings) -> str:
    """octavo serve with these settings, for a shell. Secrets are left out."""
    words = ["octavo", "serve"] + ([] if settings.model is None else [settings.model])
    for name, info in Settings.model_fields.items():
        value = getattr(settings, name)
        if name == "model" or name in SECRET_FIELDS or value == info.default:
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
        else:
            for item in value if isinstance(value, tuple) else (value,):
                words += [flag(name), str(item)]
    return shlex.join(words)
