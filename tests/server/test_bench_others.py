"""`octavo bench` against other servers: what they leave out, what they do otherwise, and what breaks."""

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from benched import ROOMY, bench, found, refusal, rounds, run_w1, scripted, url_of, whole
from canned import canned, models, piece, reply, streamed, usage
from kit import ScriptedServer, endless

DEEP = "[" * 100_000 + "]" * 100_000
UPGRADED = "it answers in another protocol than HTTP (HTTP 101)"
ODD_USAGE = "the stream's usage cannot be: {} is no number of tokens"
BREAKS = {
    "refused": (reply({"error": {"message": "out of luck"}}, 500), "HTTP 500: out of luck"),
    "plain words": (reply("bad\n gateway", 502), "HTTP 502: bad gateway"),
    "fastapi": (reply({"detail": "no"}, 400), "HTTP 400: no"),
    "nothing": (b"", "the server closed the connection before the answer ended"),
    "in a chunk": (streamed(piece("x"))[:-12], "the server closed the connection before the answer ended"),
    "between chunks": (streamed(piece("x"), ends=False), "the server closed the connection before the answer ended"),
    "unframed": (streamed(piece("x"), framed=False), "the stream ended before the answer did"),
    "error event": (streamed(piece("x"), {"error": {"message": "engine\ndied"}}), "engine died"),
    "error word": (streamed({"error": "lost"}), "lost"),
    "no JSON": (streamed("{oh"), "the stream has an event of another shape than OpenAI's: '{oh'"),
    "list": (streamed([1]), "the stream has an event of another shape than OpenAI's: '[1]'"),
    "shape": (
        streamed({"choices": [3]}),
        "the stream has an event of another shape than OpenAI's: '{\"choices\": [3]}'",
    ),
    "no text": (streamed(piece("", "stop"), "[DONE]"), "the answer has no text"),
    "terminal": (
        reply({"error": {"message": "\x1b[2Jboom\ud800\x00 \x9b"}}, 500),
        r"HTTP 500: \x1b[2Jboom\ud800\x00 \x9b",
    ),
    "terminal event": (streamed({"error": {"message": "\x1b[2Jboom"}}), r"\x1b[2Jboom"),
    "101": (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", UPGRADED),
    "deep": (streamed(DEEP), f"the stream has an event of another shape than OpenAI's: '{'[' * 58}…"),
    "deep error": (reply(DEEP, 500), f"HTTP 500: {'[' * 290}"),
    "error of lists": (reply({"error": {"message": [1, ["\x1b"]]}}, 500), r"HTTP 500: [1, ['\x1b']]"),
    **{
        f"usage {wrong}": (streamed(usage(1, wrong)), ODD_USAGE.format(repr(wrong)))
        for wrong in (-1, True, 10**10, 1.5, "7")
    },
    "usage huge": (streamed(usage(10**400, 1)), ODD_USAGE.format(f"1{'0' * 58}…")),
    "usage cached": (streamed({"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}), ODD_USAGE.format(-1)),
    "no HTTP": (b"220 mail\r\n\r\n", "what it answers is not HTTP"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_requests_that_fail_are_counted_and_the_first_is_shown(name: str, capsys: pytest.CaptureFixture[str]):
    broken, words = BREAKS[name]
    with canned(scripted(lambda n, body: broken if n in (3, 6) else whole(body))) as server:
        one = run_w1(server, capsys)
        assert (one["requests"], one["failed"], one["first_error"]) == (8, 2, words)
        assert one["output_tokens"] == 6 * 128
    with canned(scripted(lambda n, body: broken)) as server:
        code, out, _ = bench(capsys, server.url, "--workloads", "W1", "--rounds", "2")
        assert code == 1 and out.endswith(f"\n  16 of 16 requests failed at {server.url}, the first: {words}\n")


def test_a_server_that_dies(capsys: pytest.CaptureFixture[str]):
    """The rest of the requests fail too, each for itself."""
    with ScriptedServer({"": endless}, **ROOMY) as server:
        server.executor.fail_after[""] = 100  # more than the warm-up says
        report = found(capsys, url_of(server), "--rounds", "1", "--workloads", "W1,turns", code=1)
    one = rounds(report, "W1")[0]
    assert one["failed"] == 8 and "script says" in one["first_error"] and one["output_tokens"] is None
    assert rounds(report, "turns")[0]["failed"] == 0 and report["failed"] == 8


def test_a_failed_turn_ends_its_conversation(capsys: pytest.CaptureFixture[str]):
    with canned(scripted(lambda n, body: b"", chat=reply("no chats", 400))) as server:
        report = found(capsys, server.url, "--rounds", "1", "--workloads", "turns", code=1)
    assert (rounds(report, "turns")[0]["requests"], report["failed"]) == (6, 6)


def test_no_usage(capsys: pytest.CaptureFixture[str]):
    """Chunks with text are counted, and prompts cut at four characters a token."""
    bare = streamed(piece(""), piece("a"), piece("b"), piece("c", "length"), "[DONE]")

    def answer(path: str, body: dict[str, Any]) -> bytes:
        return models("m") if path == "/v1/models" else bare if path == "/v1/completions" else reply("", 404)

    with canned(answer) as server:
        one = run_w1(server, capsys, 0)
        assert one["prompt_tokens"] is one["cached_tokens"] is None
        assert (one["output_tokens"], one["counts_chunks"], one["short"]) == (8 * 3, True, 8)
        assert [len(body["prompt"]) for body in server.bodies("/v1/completions")[4:]] == [4 * 128] * 8
        assert len(server.bodies("/tokenize")) <= 4 + 8  # not asked again once it was not there
        code, out, _ = bench(capsys, server.url, "--workloads", "W1", "--rounds", "1")
    assert code == 0 and "tokens in" not in out.split("\n", 4)[4]
    assert f"  8 of 8 answers ended early at {server.url}: it did other work\n" in out
    assert out.endswith(f"  {server.url} reports no usage: tokens out are its chunks with text\n")


def test_without_tokenize_the_first_usage_says_how_long_a_token_is(capsys: pytest.CaptureFixture[str]):
    with canned(scripted(lambda n, body: whole(body))) as server:
        run_w1(server, capsys, 0)
        lengths = [len(body["prompt"]) for body in server.bodies("/v1/completions")[4:]]
    assert all(abs(length - 5 * 128) < 10 for length in lengths)  # `whole` counts five characters a token


def test_the_clock_runs_while_the_server_thinks(capsys: pytest.CaptureFixture[str]):
    """Before the first byte of the answer, and after the last of the request."""

    def slow(number: int, body: dict[str, Any]) -> bytes:
        time.sleep(0.02)
        return whole(body)

    with canned(scripted(slow)) as server:
        one = run_w1(server, capsys, 0)
    assert one["ttft_s"] >= 0.02 and one["total_s"] >= 8 * 0.02


def test_chats_that_only_think(capsys: pytest.CaptureFixture[str]):
    """The first chunk with text is the first of the reasoning, and what was thought is not sent back."""
    thinks = [{"choices": [{"delta": delta}]} for delta in ({"role": "assistant"}, {"reasoning_content": "hm"})]
    said = {"choices": [{"delta": {"content": "so"}, "finish_reason": "stop"}]}
    with canned(scripted(lambda n, body: b"", chat=streamed(*thinks, said, usage(9, 2), "[DONE]"))) as server:
        report = found(capsys, server.url, "--rounds", "1", "--workloads", "turns")
        last = server.bodies("/v1/chat/completions")[-1]["messages"]
    assert rounds(report, "turns")[0]["output_tokens"] == 60
    assert [message["role"] for message in last] == ["user", "assistant"] * 4 + ["user"]
    assert [message["content"] for message in last[1::2]] == ["so"] * 4


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 6064 tokens.",
        "the request exceeds the available context size, try increasing it",
        "The input (6000 tokens) is longer than the model's context length (4096 tokens).",
    ],
)
def test_a_window_that_only_the_refusal_tells(words: str, capsys: pytest.CaptureFixture[str]):
    refused = reply({"error": {"message": words}}, 400)
    with canned(scripted(lambda n, body: refused if len(body["prompt"]) > 9_000 else whole(body))) as server:
        report = found(capsys, server.url, "--workloads", "W4,W1", "--rounds", "2")
    assert report["workloads"]["W4"]["skipped"] == f"{server.url} says: HTTP 400: {words}"
    assert rounds(report, "W1")[1]["output_tokens"] == 1024


def test_ignore_eos(capsys: pytest.CaptureFixture[str]):
    def picky(path: str, body: dict[str, Any]) -> bytes:
        if "ignore_eos" in body:
            return reply({"error": {"message": "Unknown field: ignore_eos."}}, 400)
        return scripted(lambda n, asked: whole(asked))(path, body)

    with canned(picky) as server:
        assert "Unknown field: ignore_eos: see --no-ignore-eos." in refusal(capsys, server.url, "--workloads", "W1")
        run_w1(server, capsys, 0, "--no-ignore-eos")
    with canned(scripted(lambda n, body: whole(body))) as server:
        run_w1(server, capsys, 0)
        bodies = server.bodies("/v1/completions")
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 and body["stream"] for body in bodies)


def test_rounds_alternate_and_so_does_who_goes_first(capsys: pytest.CaptureFixture[str]):
    order: list[str] = []

    def noted(name: str) -> Callable[[int, dict[str, Any]], bytes]:
        def complete(number: int, body: dict[str, Any]) -> bytes:
            order.append(name)
            return whole(body)

        return complete

    with canned(scripted(noted("a"))) as one, canned(scripted(noted("b"))) as two:
        found(capsys, one.url, "--compare", two.url, "--workloads", "W1", "--rounds", "3")
        prompts = [[body["prompt"] for body in server.bodies("/v1/completions")] for server in (one, two)]
    assert "".join(order[::8]) == "abbaab" and order == [name for name in order[::8] for _ in range(8)]
    assert prompts[0][4:] == prompts[1][4:] and len({*prompts[0], *prompts[1]}) == 4 + 3 * 8  # 4: warm-up, two at once


def test_which_model(capsys: pytest.CaptureFixture[str]):
    with canned(scripted(lambda n, body: whole(body), models("first", "second", max_model_len=300))) as server:
        run_w1(server, capsys, 0, "--model", "second", "--api-key", "k")
        assert {body["model"] for body in server.bodies("/v1/completions")} == {"second"}
        assert set(server.keys) == {"bearer k"}
        words = refusal(capsys, server.url, "--model", "third")
        assert words == f"octavo: {server.url} serves no model 'third', but first, second: see --model.\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (models(), "serves no model."),
        (reply("x", 404), "has no /v1/models, so it is no OpenAI-compatible server."),
        (reply({"error": {"message": "The model is still loading."}}, 503), "HTTP 503: The model is still loading."),
        (reply("<html>"), "/v1/models does not answer as an OpenAI-compatible server does."),
        (reply({"data": [1]}), "/v1/models does not answer as an OpenAI-compatible server does."),
        (reply([]), "/v1/models does not answer as an OpenAI-compatible server does."),
        (reply('{"data":' + DEEP + "}"), "/v1/models does not answer as an OpenAI-compatible server does."),
        (BREAKS["101"][0], f"does not answer: {UPGRADED}."),
        (reply({"error": {"message": "\x1b[2J"}}, 500), r"HTTP 500: \x1b[2J."),
        (b"SSH-2.0-OpenSSH\r\n", "does not answer: what it answers is not HTTP."),
        (b"", "does not answer: the server closed the connection before the answer ended."),
    ],
)
def test_what_is_no_server(answer: bytes, words: str, capsys: pytest.CaptureFixture[str]):
    with canned(lambda path, body: answer) as server:
        said = refusal(capsys, server.url)
    assert said.startswith(f"octavo: {server.url}") and words in said


@pytest.mark.parametrize("length", [-5, 0, True, 10**400, 1.5, "300", None])
def test_a_window_that_is_none(length: Any, capsys: pytest.CaptureFixture[str]):
    with canned(scripted(lambda n, body: whole(body), models("m", max_model_len=length))) as server:
        report = found(capsys, server.url, "--workloads", "W1", "--rounds", "1")
    assert report["servers"][0]["max_model_len"] is None and report["failed"] == 0


def test_a_model_whose_name_a_terminal_would_obey(capsys: pytest.CaptureFixture[str]):
    name, escaped = "m\x1b[2J\ud800\n", r"m\x1b[2J\ud800\n"
    with canned(scripted(lambda n, body: whole(body), models(name))) as server:
        code, out, _ = bench(capsys, server.url, "--workloads", "W1", "--rounds", "1")
        assert code == 0 and out.splitlines()[1] == f"{escaped} at {server.url}"
        report = found(capsys, server.url, "--workloads", "W1", "--rounds", "1")
        assert report["servers"][0]["model"] == escaped
        assert {body["model"] for body in server.bodies("/v1/completions")} == {name}
        assert refusal(capsys, server.url, "--model", "x").endswith(f"'x', but {escaped}: see --model.\n")


@pytest.mark.parametrize("said", [DEEP, '{"tokens":' + DEEP + "}", '{"tokens": "abc"}', '{"tokens": []}', "[]"])
def test_a_tokenize_that_is_none(said: str, capsys: pytest.CaptureFixture[str]):
    plain = scripted(lambda n, body: whole(body))
    with canned(lambda path, body: reply(said) if path == "/tokenize" else plain(path, body)) as server:
        run_w1(server, capsys, 0)


def test_a_usage_of_no_tokens_is_a_count(capsys: pytest.CaptureFixture[str]):
    none = streamed(piece("x", "length"), usage(0, 0), "[DONE]")
    with canned(scripted(lambda n, body: none)) as server:
        one = run_w1(server, capsys, 0)
        assert (one["prompt_tokens"], one["output_tokens"], one["counts_chunks"], one["short"]) == (0, 0, False, 8)
        assert bench(capsys, server.url, "--workloads", "W1", "--rounds", "1")[0] == 0


def test_nobody_there(capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        expected = f"octavo: {url} does not answer: no connection: connection refused.\n"
        assert refusal(capsys, url) == refusal(capsys, f"{url}/v1") == expected
    assert "no connection" in refusal(capsys, "http://nobody.invalid")
    with canned(lambda path, body: models("m")) as server:
        assert "no connection: " in refusal(capsys, server.url.replace("http", "https"))


def test_a_server_that_fails_from_the_start(capsys: pytest.CaptureFixture[str]):
    with canned(lambda path, body: models("m") if path == "/v1/models" else reply("broken", 500)) as server:
        assert refusal(capsys, server.url) == f"octavo: {server.url} fails: HTTP 500: broken.\n"
