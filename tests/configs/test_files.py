"""Files that flags name: text, of an end."""

import os
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.files import MAX_MIB, open_text


def read(path: str | Path) -> str:
    with open_text("--flag", path) as file:
        return file.read()


def test_text_with_and_without_a_mark_at_its_beginning(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "x").write_text("é\n", encoding=encoding)
        assert read(tmp_path / "x") == "é\n"


def test_what_may_never_end_is_not_read(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    for path in (str(tmp_path), "/dev/null", str(pipe), "/dev/zero"):
        with pytest.raises(SettingsError, match=f"^--flag {path} is not a regular file"):
            read(path)
    with large.open("wb") as file:
        file.truncate(MAX_MIB * 2**20 + 1)
    with pytest.raises(SettingsError, match=r"large has more than 256 MiB: give a part of it\."):
        read(large)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^--flag ~nobody-here/x cannot be read: Could not determine"):
        read("~nobody-here/x")
    with pytest.raises(SettingsError, match=r"^--flag /nowhere cannot be read: No such file or directory\.$"):
        read("/nowhere")
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is not UTF-8 text"):
        read(tmp_path / "x")
