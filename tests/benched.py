"""`octavo bench` for tests: as a command, and servers by script for it to ask."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from canned import Canned, models, piece, reply, streamed, usage
from kit import ScriptedServer

from server.bench.workloads import WARM_UP
from server.cli import main

ROOMY: dict[str, Any] = {"window": 8192, "num_blocks": 16384, "max_num_seqs": 16, "max_num_batched_tokens": 4096}


def url_of(server: ScriptedServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    code = main(["bench", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def found(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    """What --json - prints."""
    ended, out, err = bench(capsys, *argv, "--json", "-")
    assert ended == code and err == "", (ended, err)
    return json.loads(out)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = bench(capsys, *argv)
    assert code == 2 and out == "" and err.startswith("octavo: ") and err.endswith(".\n") and err.count("\n") == 1, err
    return err


def rounds(report: dict[str, Any], name: str, server: int = 0) -> list[dict[str, Any]]:
    return report["workloads"][name]["servers"][server]["rounds"]


def scripted(
    complete: Callable[[int, dict[str, Any]], bytes], listed: bytes = models("m"), chat: bytes = b""
) -> Callable[[str, dict[str, Any]], bytes]:
    """complete(n, body): to the completion number n, warm-up left out."""
    done = [0]

    def answer(path: str, body: dict[str, Any]) -> bytes:
        if path == "/v1/models":
            return listed
        if path == "/v1/chat/completions":
            return chat
        if path != "/v1/completions":
            return reply("nothing here", 404)
        if body["max_tokens"] == WARM_UP.output_tokens[0]:
            return whole(body)
        done[0] += 1
        return complete(done[0], body)

    return answer


def whole(body: dict[str, Any]) -> bytes:
    count = body["max_tokens"]
    pieces = [piece("x", "length" if number + 1 == count else None) for number in range(count)]
    return streamed(*pieces, usage(len(body["prompt"]) // 5, count), "[DONE]")


def run_w1(server: Canned, capsys: pytest.CaptureFixture[str], code: int = 1, *argv: str) -> dict[str, Any]:
    return rounds(found(capsys, server.url, "--workloads", "W1", "--rounds", "1", *argv, code=code), "W1")[0]
