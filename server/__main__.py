"""`python -m server ARGUMENTS` is `octavo serve ARGUMENTS`; the word `serve` in front of them changes nothing."""

import sys

from server.cli import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(arguments if arguments[:1] == ["serve"] else ["serve", *arguments]))
