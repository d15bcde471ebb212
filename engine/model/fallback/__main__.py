"""`python -m engine.model.fallback FOLDER TRUST`: prints why the model in FOLDER cannot be served, nothing if it can.

FOLDER need not hold weights; TRUST is 1 where the model's own code may be run. A process of its own, since the API
process, which wants to know before it fetches gigabytes, has no torch.
"""

import sys
from pathlib import Path

from engine.errors import StartupError
from engine.model.registry import read_config


def main(folder: str, trust_remote_code: str) -> None:
    try:
        read_config(Path(folder), trust_remote_code == "1")
    except StartupError as error:
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
