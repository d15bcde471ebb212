"""`python -m server` is `octavo serve`; the word may be left out."""

import sys

from server.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["serve"]))
