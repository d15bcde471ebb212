"""How a Python process of this very copy of Octavo is started."""

import sys
from pathlib import Path

HOME = str(Path(__file__).parent.parent)
RUN = (
    "import runpy, sys; home, module = sys.argv.pop(1), sys.argv.pop(1); home in sys.path or sys.path.insert(0, home); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: str) -> list[str]:
    """`python -m module arguments`: of this copy, since `python -m server` in a checkout may run beside an installed
    one, and without the working directory (`-P`), where a stray configs.py would shadow ours."""
    return [sys.executable, "-P", "-c", RUN, HOME, module, *arguments]
