"""What the documents promise exists."""

import re
from pathlib import Path

from configs.load import default_of
from configs.settings import Settings, flag

ROOT = Path(__file__).parent.parent


def test_every_setting_is_documented_with_its_default_and_help_and_nothing_else() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    assert rows == [(flag(name), default_of(info), info.description) for name, info in Settings.model_fields.items()]


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
