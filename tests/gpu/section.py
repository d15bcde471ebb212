"""Runs one section of the check script in this process: python -m gpu.section MODULE NAME SCRATCH SHARE/SHARES"""

import importlib
import sys
from pathlib import Path

from gpu.bench import Bench
from gpu.findings import Findings


def run(module: str, name: str, scratch: Path, share: str = "0/1", interpreted: bool = False) -> Findings:
    """`module` has a function `run(bench)`. What it finds is in SCRATCH/NAME.json too, from line to line."""
    findings = Findings(scratch / f"{name}.json")
    index, count = map(int, share.split("/"))
    with findings.case("the section comes to its end"):
        importlib.import_module(module).run(Bench(findings, scratch, interpreted, index, count))
    return findings


if __name__ == "__main__":
    module, name, scratch, share = sys.argv[1:]
    run(module, name, Path(scratch), share)
