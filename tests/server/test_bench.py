"""`octavo bench` against a server that works: from the command line to the table."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benched import ROOMY, bench, found, refusal, rounds, url_of
from canned import canned, models, reply
from kit import MODEL, ScriptedServer, endless, eventually

from server.bench.command import DESCRIPTION
from server.bench.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
WARM_UP_TOKENS = 4 * 16


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"": endless}, **ROOMY) as running:
        yield running
        running.assert_idle()


# ---------------------------------------------------------------- a server that works
def test_every_workload_asks_for_what_it_says(server: ScriptedServer, capsys: pytest.CaptureFixture[str]):
    report = found(capsys, url_of(server), "--rounds", "1", "--seed", "7")
    assert report["servers"] == [{"url": url_of(server), "model": MODEL, "max_model_len": 8192}]
    assert (report["rounds"], report["seed"], report["failed"]) == (1, 7, 0) and list(report["workloads"]) == [
        *WORKLOADS
    ]
    sums = {name: rounds(report, name)[0] for name in WORKLOADS}
    # a character of the text that is not ASCII has several tokens here, and cannot be cut
    assert {name: one["requests"] for name, one in sums.items()} == {"W1": 8, "W2": 32, "W3": 32, "W4": 4, "turns": 30}
    for name, tokens in {"W1": 8 * 128, "W3": 32 * 1531, "W4": 4 * 6000}.items():
        assert tokens - 4 <= sums[name]["prompt_tokens"] <= tokens + 4
    for name, tokens in {"W1": 8 * 128, "W3": 32 * 32, "W4": 4 * 64, "turns": 30 * 64}.items():
        assert sums[name]["output_tokens"] == tokens
    assert 32 * 64 < sums["W2"]["prompt_tokens"] < 32 * 512 and 32 * 32 < sums["W2"]["output_tokens"] < 32 * 128
    counted = server.metrics()
    tokens = sum(one["output_tokens"] for one in sums.values()) + WARM_UP_TOKENS
    assert counted["vllm:generation_tokens_total",] == tokens
    for one in sums.values():
        assert one["short"] == one["failed"] == 0 and not one["counts_chunks"]
        assert one["output_tokens_per_s"] == one["output_tokens"] / one["total_s"]
        assert 0 < one["ttft_s"] < one["total_s"] and 0 <= one["token_s"] < one["total_s"]
        assert one["gap_p95_s"] >= 0 and (one["ttft_p95_s"] is None) == (one["requests"] < 20)


def test_what_the_prefix_cache_saves(server: ScriptedServer, capsys: pytest.CaptureFixture[str]):
    """A conversation's earlier turns, answers too, are the prefix of the next; prompts of W1 have nothing in common."""
    report = found(capsys, url_of(server), "--rounds", "2", "--workloads", "turns,W1,W3")
    for one in rounds(report, "turns"):
        assert 0.6 < one["cached_tokens"] / one["prompt_tokens"] < 0.8
    for one in rounds(report, "W3"):
        assert one["cached_tokens"] > 24 * 1500  # those that came first, eight at most, may miss
    for one in rounds(report, "W1"):
        assert one["cached_tokens"] < 100


def test_the_table(server: ScriptedServer, capsys: pytest.CaptureFixture[str]):
    code, out, err = bench(capsys, url_of(server), "--rounds", "2", "--workloads", "W2", "--seed", "3")
    lines = out.splitlines()
    assert code == 0 and err == ""
    assert lines[0].endswith("2 rounds, seed 3") and lines[1] == f"{MODEL} at {url_of(server)}"
    assert lines[3] == "W2: 32 requests, 16 at once, 64–512 tokens in, 32–128 out"
    assert [line[2:27].rstrip() for line in lines[5:]] == [
        "tokens in", "  of them cached", "tokens out", "output tokens/s", "total time, s", "time to first token, s",
        "  p95", "time between tokens, ms", "  p95 of single gaps",
    ]  # fmt: skip
    assert all(" to " in line for line in lines[5:])


def test_two_servers_get_the_same_prompts(server: ScriptedServer, capsys: pytest.CaptureFixture[str]):
    with ScriptedServer({"": endless}, **ROOMY) as other:
        report = found(
            capsys, f"127.0.0.1:{server.port}/v1/", "--compare", url_of(other), "--rounds=2", "--workloads=W2,W1"
        )
        assert sorted(server.executor.prompts) == sorted(other.executor.prompts)
        assert len(server.executor.prompts) == 4 + 2 * 40
        code, out, _ = bench(capsys, url_of(server), "--compare", url_of(other), "--rounds=1", "--workloads=W1")
    assert [one["url"] for one in report["servers"]] == [url_of(server), url_of(other)]
    for name in ("W1", "W2"):
        ratio = report["workloads"][name]["ratios"]["total_s"]
        ours, theirs = ([one["total_s"] for one in rounds(report, name, place)] for place in (0, 1))
        pairs = sorted(b / a for a, b in zip(ours, theirs, strict=True))
        assert ratio == {"median": sum(pairs) / 2, "min": pairs[0], "max": pairs[1]}
    assert code == 0 and f"A: {MODEL} at {url_of(server)}\nB: {MODEL} at {url_of(other)}\n" in out
    assert "A ahead by" in out and re.search(r"total time, s +[0-9.]+ +[0-9.]+ +[0-9.]+×\n", out)


def test_a_short_window_skips_with_the_numbers(capsys: pytest.CaptureFixture[str]):
    with ScriptedServer({"": endless}, **{**ROOMY, "window": 6063}) as server:
        report = found(capsys, url_of(server), "--workloads", "W4,W1", "--rounds", "1")
        code, out, _ = bench(capsys, url_of(server), "--workloads", "W4", "--rounds", "1")
    words = f"it takes 6,064 tokens, and the window of {url_of(server)} is 6,063"
    assert report["workloads"]["W4"]["skipped"] == words and "servers" in report["workloads"]["W1"]
    assert code == 2 and out.endswith(f"64 out\n  skipped: {words}\n"), "nothing was measured"


def test_json_in_a_file_beside_the_table(server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "found.json"
    code, said, _ = bench(capsys, url_of(server), "--rounds=1", "--workloads=W1", "--json", str(out))
    assert code == 0 and "W1: 8 requests" in said
    assert json.loads(out.read_text())["workloads"]["W1"]["servers"][0]["median"]["output_tokens"] == 1024


def test_own_text(server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("".join(f"{number:05d}" for number in range(2_000)))
    found(capsys, url_of(server), "--rounds", "1", "--workloads", "W1", "--text", str(text))
    assert all(set(prompt) <= set(b"0123456789") for prompt in server.executor.prompts)
    text.write_text("short")
    assert "has 5 characters, and 10,000 are needed" in refusal(capsys, url_of(server), "--text", str(text))
    text.write_bytes(b"\xff" * 20_000)
    assert f"--text {text} is not UTF-8 text" in refusal(capsys, url_of(server), "--text", str(text))
    assert "No such file" in refusal(capsys, url_of(server), "--text", str(tmp_path / "none"))
    assert "--text /dev/zero is not a regular file" in refusal(capsys, url_of(server), "--text", "/dev/zero")


def test_a_key(capsys: pytest.CaptureFixture[str]):
    with ScriptedServer({"": endless}, **ROOMY, api_key=["secret"]) as server:
        for key in ([], ["--api-key", "wrong"]):
            assert "refuses the key (HTTP 401): see --api-key" in refusal(capsys, url_of(server), *key)
        code, out, _ = bench(
            capsys, url_of(server), "--api-key", "secret", "--rounds=1", "--workloads=turns", "--json=-"
        )
    assert code == 0 and "secret" not in out


def command(*argv: str) -> list[str]:
    """Interrupted by SIGINT also where a shell that runs the tests in the background has had it ignored."""
    code = "import signal, sys, server.cli; signal.signal(signal.SIGINT, signal.default_int_handler);"
    return [sys.executable, "-c", f"{code} sys.exit(server.cli.main())", "bench", *argv]


def test_ctrl_c():
    """While both of the warm-up's clients wait for an answer."""
    ends = threading.Event()

    def answer(path: str, body: dict[str, Any]) -> bytes:
        if path == "/v1/completions":
            ends.wait()
        return models("m") if path == "/v1/models" else reply("", 404)

    with canned(answer) as server:
        process = subprocess.Popen(
            command(server.url), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        eventually(lambda: len(server.bodies("/v1/completions")) == 2, 60)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            ends.set()
    assert (process.returncode, out, err) == (130, "", "octavo: bench was interrupted: nothing is reported.\n")


def test_a_bar_on_a_terminal_and_nothing_of_it_on_stdout(server: ScriptedServer):
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    process = subprocess.Popen(
        command(url_of(server), "--rounds=1", "--workloads=W1", "--json=-"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=end,
    )
    os.close(end)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and json.loads(out)["failed"] == 0
    assert b"W1, round 1 of 1" in shown and b"/8 [" in shown


# ---------------------------------------------------------------- flags
def test_flags_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    url = "http://127.0.0.1:9"
    assert "URL; see octavo bench --help" in refusal(capsys)
    assert "there is no 'w1', but W1, W2, W3, W4, turns" in refusal(capsys, url, "--workloads", "w1")
    assert "--rounds must be at least 1, got 0" in refusal(capsys, url, "--rounds", "0")
    assert "--seed" in refusal(capsys, url, "--seed", "x")
    assert "--round" in refusal(capsys, url, "--round", "1")
    assert "names the same server" in refusal(capsys, url, "--compare", "127.0.0.1:9/v1")
    for wrong in ("", "ftp://x", "http://", "http://x:99999", "http://[", "file:///x"):
        assert f"{wrong!r} is not the URL of a server" in refusal(capsys, wrong)
    for out in (tmp_path, tmp_path / "no" / "file"):
        assert f"--json {out} cannot be written" in refusal(capsys, url, "--json", str(out))


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["http://x", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert bench(capsys, *argv) == (0, DESCRIPTION, "")
    assert max(map(len, DESCRIPTION.splitlines())) <= 80
