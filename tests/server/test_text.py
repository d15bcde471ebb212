"""Text as it reaches clients: stop strings, characters over several tokens, usage, failures in the middle."""

from collections.abc import Iterator

import httpx2
import pytest
from bytetok import EOS, FIRST_WORD, IM_END
from kit import MODEL, ScriptedServer, Stream, endless, receive_until

pytestmark = pytest.mark.usefixtures("idle_afterwards")
SCRIPTS = {
    "s1": b"ABCDEFGHIJKL",
    "s2": [FIRST_WORD],  # "x\n\ny", one token
    "emoji": "👍é漢 ok".encode(),
    "bad": b"a\xffb",
    "ends": [72, 105, IM_END],
    "long": endless,
    "broken": b"ABCDEF",
    "stillborn": b"ABC",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(SCRIPTS, words=["x\n\ny"]) as server:
        server.executor.fail_after = {"broken": 3, "stillborn": 0}
        yield server


def one_by_one(server: ScriptedServer, content: str, **fields) -> Stream:
    """A streamed answer whose reader keeps up: one delta a token."""
    return server.in_slow_motion(lambda: server.stream_chat(content, **fields))


# ---------------------------------------------------------------------- A01
@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_a01_stop_strings_that_span_tokens(server: ScriptedServer, endpoint: str):
    whole = server.chat if endpoint == "chat" else server.completion
    streamed = server.stream_chat if endpoint == "chat" else server.stream_completion

    def text(choice: dict) -> str:
        return choice["message"]["content"] if "message" in choice else choice["text"]

    for include, expected in ((False, "ABC"), (True, "ABCDEFGHIJ")):
        fields = {"stop": ["DEFGHIJ"], "include_stop_str_in_output": include}
        [choice] = whole("s1", **fields)["choices"]
        assert text(choice) == expected and choice["finish_reason"] == "stop" and choice["stop_reason"] == "DEFGHIJ"
        stream = streamed("s1", **fields)
        assert stream.text() == expected and stream.finish() == "stop"
        assert include or not any("D" in delta for delta in stream.deltas()), "a part of the stop string leaked"


def test_a01_nothing_leaks_however_slowly_tokens_come(server: ScriptedServer):
    stream = one_by_one(server, "s1", stop=["DEFGHIJ"])
    assert stream.deltas() == ["A", "B", "C"] and stream.finish() == "stop"


def test_a01_text_that_only_might_be_a_stop_string_is_released(server: ScriptedServer):
    assert one_by_one(server, "s1", stop=["DEFX"]).text() == "ABCDEFGHIJKL"


@pytest.mark.parametrize("stop", ["\n\n", ["\n\n"]])
def test_a01_a_stop_string_inside_one_token(server: ScriptedServer, stop):
    [choice] = server.chat("s2", stop=stop)["choices"]
    assert choice["message"]["content"] == "x" and choice["finish_reason"] == "stop"


# ---------------------------------------------------------------------- A02
def test_a02_characters_split_over_tokens(server: ScriptedServer):
    for stream in (server.stream_chat("emoji"), one_by_one(server, "emoji")):
        assert stream.text() == "👍é漢 ok" and not any("�" in delta for delta in stream.deltas())


def test_a02_a_cut_inside_a_character_is_the_same_in_both_modes(server: ScriptedServer):
    [choice] = server.chat("emoji", max_tokens=2)["choices"]
    stream = server.stream_chat("emoji", max_tokens=2)
    assert choice["finish_reason"] == stream.finish() == "length"
    assert choice["message"]["content"] == stream.text() and stream.text().count("�") <= 1


def test_a02_invalid_bytes_do_not_stall(server: ScriptedServer):
    assert server.stream_chat("bad").text() == "a�b"


def test_control_tokens_stay_out_of_the_text(server: ScriptedServer):
    assert server.chat("ends")["choices"][0]["message"]["content"] == server.stream_chat("ends").text() == "Hi"
    shown = server.chat("ends", skip_special_tokens=False, ignore_eos=True, max_tokens=5)["choices"][0]["message"][
        "content"
    ]
    assert shown.startswith("Hi<|im_end|>")


# ---------------------------------------------------------------------- A14
@pytest.mark.parametrize("n", [1, 3])
def test_a14_usage_in_streams(server: ScriptedServer, n: int):
    stream = server.stream_chat("s1", n=n, stream_options={"include_usage": True})
    *body, last = stream.frames
    usage = last["usage"]
    assert last["choices"] == [] and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all("usage" in frame and frame["usage"] is None for frame in body)
    whole = server.chat("s1", n=n)["usage"]
    for numbers in (usage, whole):
        del numbers["prompt_tokens_details"]  # the second request finds the first one's prompt in the cache
    assert usage == whole
    assert sum(choice["finish_reason"] is not None for choice in stream.choices()) == n
    assert len({frame["id"] for frame in stream.frames}) == len({frame["created"] for frame in stream.frames}) == 1
    assert all(frame["object"] == "chat.completion.chunk" for frame in stream.frames)
    assert body[0]["choices"][0]["delta"]["role"] == "assistant"


def test_a14_no_usage_unless_asked_for(server: ScriptedServer):
    for stream in (server.stream_chat("s1"), server.stream_completion("s1")):
        assert all("usage" not in frame for frame in stream.frames)


def test_running_usage_on_every_chunk(server: ScriptedServer):
    stream = server.stream_chat("s1", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [frame["usage"]["completion_tokens"] for frame in stream.frames]
    assert counts == sorted(counts) and counts[-1] == 13


def test_order_of_a_streams_chunks(server: ScriptedServer):
    stream = one_by_one(server, "s1", max_tokens=3)
    deltas = [choice["delta"] for choice in stream.choices()]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "A"}, {"content": "B"}, {"content": "C"}, {}]
    assert [c["finish_reason"] for c in stream.choices()] == [None] * 4 + ["length"]


def test_nothing_is_sent_before_the_first_token(server: ScriptedServer):
    server.executor.hold()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "s1"}], "stream": True}
    with pytest.raises(httpx2.ReadTimeout), server.http.stream("POST", "/v1/chat/completions", json=body, timeout=0.3):
        pass
    server.executor.allow(None)


# ---------------------------------------------------------------------- A15
def test_a15_an_input_error_has_a_status_in_stream_mode_too(server: ScriptedServer):
    response = server.post_chat("x" * 600, stream=True)
    assert response.status_code == 400 and response.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_a15_a_failure_in_the_middle_is_an_error_frame(server: ScriptedServer, endpoint: str):
    # Token by token, so that the failure comes when the stream is under way.
    if endpoint == "chat":
        stream = one_by_one(server, "broken")
        assert stream.text() == "ABC"
    else:
        stream = server.stream_completion("broken")
    assert {"message", "type", "code"} <= stream.frames[-1]["error"].keys() and stream.raw.endswith("data: [DONE]\n\n")
    assert stream.num_done == 1 and not any(choice["finish_reason"] for choice in stream.choices())


def test_a15_a_failure_before_the_first_token_has_a_status(server: ScriptedServer):
    for stream in (False, True):
        response = server.post_chat("stillborn", stream=stream)
        assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
        assert error["type"] == "server_error" and error["code"] == "request_failed"


def test_a15_a_failure_fails_the_request_alone(server: ScriptedServer):
    server.executor.hold()
    with server.open_request("long", max_tokens=20) as bystander:
        server.executor.allow(None)
        assert server.post_completion("broken").status_code == 500
        assert b'"finish_reason":"length"' in receive_until(bystander, b'"usage"')


def test_a15_streams_that_succeed_have_one_end(server: ScriptedServer):
    for fields in ({}, {"n": 2}, {"max_tokens": 3}, {"stop": "F"}, {"stream_options": {"include_usage": True}}):
        for stream in (server.stream_chat("s1", **fields), server.stream_completion("s1", **fields)):
            assert stream.num_done == 1 and stream.raw.endswith("data: [DONE]\n\n")
            for index in range(fields.get("n", 1)):
                stream.finish(index)
            assert stream.response.headers["content-type"].startswith("text/event-stream")
            assert stream.response.headers["cache-control"] == "no-cache"
            assert stream.response.headers["x-accel-buffering"] == "no"


def test_eos_is_counted_the_same_way_in_both_modes(server: ScriptedServer):
    assert server.chat("s1", return_token_ids=True)["choices"][0]["token_ids"] == [*b"ABCDEFGHIJKL", EOS]
    stream = server.stream_chat("s1", return_token_ids=True)
    assert [token for c in stream.choices() for token in c.get("token_ids", ())] == [*b"ABCDEFGHIJKL", EOS]
    assert stream.frames[0]["prompt_token_ids"][-1:] == [ord("\n")]
