"""Text files that flags name."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from configs.errors import SettingsError, reason_of

MAX_MIB = 256
"""Of a file: nothing that is asked for is as long."""


@contextmanager
def open_text(flag: str, path: str | Path) -> Iterator[TextIO]:
    """UTF-8, with or without a mark at its beginning. Raises `SettingsError`, also for what goes wrong while the file
    is read, and for what is no regular file: a pipe may never end, nor a device."""
    try:
        place = Path(path).expanduser()
        found = place.stat()
        if not stat.S_ISREG(found.st_mode):
            raise SettingsError(f"{flag} {path} is not a regular file.")
        if found.st_size > MAX_MIB * 2**20:
            raise SettingsError(f"{flag} {path} has more than {MAX_MIB} MiB: give a part of it.")
        with place.open(encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError:
        raise SettingsError(f"{flag} {path} is not UTF-8 text.") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: '~' of nobody
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise SettingsError(f"{flag} {path} cannot be read: {reason}.") from None
