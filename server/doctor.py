"""`octavo doctor`: the engine's diagnosis, for people in 80 columns or for programs as JSON."""

import json
import textwrap
from collections.abc import Sequence

from configs.load import load
from configs.version import VERSION

WIDTH = 80
USAGE = """\
usage: octavo doctor [MODEL] [flags of octavo serve] [--json]

Says what this machine has, which kernels serve and why others do not, how large
the KV cache would be, and tries for ten seconds whether answers come out right.
MODEL is looked at if it is on this machine; nothing is fetched. The exit code
is 0 if all is well, 1 if there are problems.
"""


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises `SettingsError` for flags that are not known."""
    if any(argument in ("--help", "-h") for argument in arguments):
        print(USAGE, end="")
        return 0
    rest = [argument for argument in arguments if argument != "--json"]
    settings = load(rest).settings
    from engine import Diagnosis, configure_logging, diagnose

    configure_logging("error", settings.log_format)
    found: Diagnosis = diagnose(settings)
    if len(rest) < len(arguments):
        report = {"octavo": VERSION, "ok": not found.problems, "problems": found.problems, **found.sections}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print(as_text(found.sections, found.problems))
    return 1 if found.problems else 0


def as_text(sections: dict[str, dict[str, str]], problems: Sequence[str]) -> str:
    """Tables, then the verdict. No line is longer than `WIDTH`, except for words that are."""
    blocks = [f"Octavo {VERSION}", *(table(title, rows) for title, rows in sections.items())]
    if problems:
        blocks.append("\n".join(["PROBLEMS", *(wrapped(f"  * {problem}", "    ") for problem in problems)]))
    else:
        blocks.append("All is well.")
    return "\n\n".join(blocks)


def table(title: str, rows: dict[str, str]) -> str:
    """Names and what they come to, below a title."""
    width = max(map(len, rows), default=0)
    lines = (wrapped(f"  {name:<{width}}  {value}", " " * (width + 4)) for name, value in rows.items())
    return "\n".join([title, *lines])


def wrapped(line: str, indent: str) -> str:
    """`indent`: of all lines but the first."""
    return "\n".join(
        textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, drop_whitespace=True, break_long_words=False, break_on_hyphens=False
        )
    )
