"""`python -m engine.model.fallback FOLDER TRUST`: whether the model in FOLDER can be served.

FOLDER need not hold weights; TRUST is 1 where the model's own code may be run. The exit code is 0 if it can, 3 if not.
Standard output holds the model's sizes (`configs.probed.ProbedConfig.as_text`) or the reason, and nothing else. A
process of its own, since those who ask have no torch: the API process before it fetches gigabytes, and the planner.
"""

import os
import sys
from pathlib import Path

from configs.probed import ProbedConfig
from engine.errors import StartupError
from engine.model.registry import read_config

REFUSED = 3


def main(folder: str, trust_remote_code: str) -> int:
    """The exit code."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)  # what a model's own code prints is no answer
        try:
            config = read_config(Path(folder), trust_remote_code == "1")
        except StartupError as error:
            answer.write(str(error))
            return REFUSED
        if isinstance(config, ProbedConfig):
            answer.write(config.as_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
