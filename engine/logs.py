"""How both processes write their logs: words on a terminal, a JSON object a line elsewhere.

Loggers are named `octavo.PART`; those of libraries are shown as `octavo.LIBRARY`, so that one prefix finds everything.
A record's `fields` (`extra={"fields": …}`) are numbers and names for machines: keys of the JSON object, and left out of
the words, which say them their own way.
"""

import logging
import sys
import time
import traceback
from typing import Any, TextIO

import msgspec

PREFIX = "octavo."
WORDS = "%(asctime)s %(levelname)s %(shown_name)s: %(message)s"


class Text(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO octavo.server: words`"""

    def __init__(self) -> None:
        super().__init__(WORDS)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.shown_name = named(record.name)
        return super().formatMessage(record)


class JSONLines(logging.Formatter):
    """One object a record: `time` (UTC), `level`, `logger`, `message`, then the record's fields, then `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": named(record.name),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return msgspec.json.encode(line, enc_hook=str).decode()


def named(logger: str) -> str:
    return logger if logger.startswith(PREFIX) else PREFIX + logger


def is_json(log_format: str, stream: TextIO) -> bool:
    """What `auto` comes to."""
    return log_format == "json" or (log_format == "auto" and not stream.isatty())


def configure_logging(level: str, log_format: str) -> None:
    """Everything this process logs goes to standard error in one form; `level` and `log_format` as in `Settings`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if is_json(log_format, sys.stderr) else Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for library in ("uvicorn", "asyncio", "httpx", "httpcore", "httpx2", "filelock", "fsspec", "urllib3"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
