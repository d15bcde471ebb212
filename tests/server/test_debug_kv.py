"""GET /debug/kv as people read it: indented, every number once, every name documented."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import ScriptedServer

from engine.messages import CacheInfo, EngineReady, Stats

ISSUE = [
    "total_pages", "used_pages", "cached_pages", "free_pages", "utilization", "slot_utilization", "active_requests",
    "bytes_per_page", "bytes_per_token", "total_bytes",
]  # fmt: skip
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEF"}) as server:
        server.chat("s1")
        server.chat("s1")
        yield server


def names(report: dict[str, Any]) -> list[str]:
    """Dotted, without what is inside counters by reason and events."""
    found = []
    for name, value in report.items():
        inner = value if name in ("cache", "counters") else {}
        found += [f"{name}.{each}" for each in inner] or [name]
    return found


def test_it_is_indented_and_an_event_is_a_line(server: ScriptedServer) -> None:
    text = server.http.get("/debug/kv").text
    report = json.loads(text)
    lines = text.splitlines()
    assert lines[0] == "{" and lines[-1] == "}" and f'  "total_pages": {report["total_pages"]},' in lines
    assert '    "block_size": 4,' in lines
    assert len(report["events"]) > 1
    assert [json.loads(line.rstrip(",")) for line in lines if line.startswith('    {"')] == report["events"]


def test_without_events(server: ScriptedServer) -> None:
    assert server.http.get("/debug/kv?events=0").json()["events"] == []


def test_the_names_of_memory_stats_stand_at_the_top(server: ScriptedServer) -> None:
    assert [name for name in server.http.get("/debug/kv").json() if name in ISSUE] == ISSUE


def test_every_number_has_one_name(server: ScriptedServer) -> None:
    """Told by numbers that differ: the engine's figures are moved apart, then looked for."""
    client = server.context.client
    assert client is not None and client.info is not None
    earlier = client.stats
    taken = {"pages_total", "pages_free", "pages_active", "pages_cached", "running"}  # in memory_stats()
    marks = {name: 10_000 + n for n, name in enumerate(Stats.__struct_fields__)}
    try:
        client.stats = Stats(**marks)
        report = server.http.get("/debug/kv?events=0").json()
    finally:
        client.stats = earlier
    values = [value for value in (*report.values(), *report["counters"].values()) if isinstance(value, int)]
    for name, mark in marks.items():
        assert values.count(mark) == (0 if name in taken or name == "received_total" else 1), name


def test_the_cache_as_it_was_made_at_start(server: ScriptedServer) -> None:
    client = server.context.client
    assert client is not None and client.info is not None
    made = {"dtype": "int8/int4", "scales": "x.st", "fitted_layers": 3, "divergence": 0.0, "agreement": 1.0}
    earlier, client.info = (
        client.info,
        EngineReady(
            CacheInfo(64, 16, 4096, 256, max_model_len=512, enable_prefix_caching=True, refresh_interval=64, **made),
            {},
            9,
        ),
    )
    try:
        report = server.http.get("/debug/kv?events=0").json()
    finally:
        client.info = earlier
    expected = {"block_size": 16, "max_model_len": 512, "enable_prefix_caching": True, "refresh_interval": 64, **made}
    assert report["cache"] == expected
    plain = server.http.get("/debug/kv?events=0").json()["cache"]
    assert plain["scales"] is plain["divergence"] is plain["agreement"] is plain["refresh_interval"] is None
    assert plain["fitted_layers"] == 0


def test_every_name_is_documented_and_nothing_else(server: ScriptedServer) -> None:
    section = DOCUMENT.read_text().partition("## GET /debug/kv")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \|", section, re.MULTILINE)
    documented = [name for cell in documented for name in re.findall(r"`([\w.]+)`", cell)]
    assert sorted(documented) == sorted(names(server.http.get("/debug/kv").json()))


def test_the_page_reads_names_that_exist(server: ScriptedServer) -> None:
    report = server.http.get("/debug/kv").json()
    script = server.http.get("/web/page.js").text
    read = set(re.findall(r"\bkv\.(\w+(?:\.\w+)?)", script))
    read = {name if name.partition(".")[0] in ("cache", "counters") else name.partition(".")[0] for name in read}
    assert len(read) > 10 and read <= set(names(report))


def test_the_page_has_every_element_that_its_script_names(server: ScriptedServer) -> None:
    page, script = (server.http.get(path).text for path in ("/", "/web/page.js"))
    named = set(re.findall(r'\b(?:at|say)\("([\w-]+)"', script)) - {"bar-"}
    assert len(named) > 10 and named <= set(re.findall(r'id="([\w-]+)"', page))
    bar = {name for name in re.findall(r'class="(\w+)"></i>', page) if name != "free"}
    assert {f"bar-{name}" for name in bar} | bar <= set(re.findall(r'id="([\w-]+)"', page))
