"""Prompt and output in the window: what is refused, clamped, shortened on request, and how limits are named (A11, A17,
A23)."""

from collections.abc import Iterator

import pytest
from kit import ScriptedServer, endless, user
from refusals import assert_refused

pytestmark = pytest.mark.usefixtures("idle_afterwards")
WINDOW = 128


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEFGHIJKL", "long": endless}, window=WINDOW) as server:
        yield server


# ---------------------------------------------------------------------- A11
def test_a11_a_text_that_cannot_fit_is_not_tokenised(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.text.tokenizer._encode", None)
    text = "x" * (20 * WINDOW)
    for response in (server.post_completion(text), server.post_completion(["s1", text][1:])):
        error = assert_refused(response, code="context_length_exceeded")
        assert "at least" in error["message"]
    assert_refused(server.post_chat(text), code="context_length_exceeded")


def test_a11_a_long_text_may_be_truncated_or_counted(server: ScriptedServer):
    text = "x" * (20 * WINDOW) + " s1"
    assert server.post_completion(text, truncate_prompt_tokens=8).status_code == 200
    assert server.http.post("/tokenize", json={"prompt": text}).json()["count"] == len(text)


def test_a11_no_text_is_so_long_that_counting_it_takes_the_memory(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("engine.text.tokenizer._encode", None)
    long = "x" * ((1 << 20) + 1)
    code = "string_above_max_length"
    assert_refused(server.http.post("/tokenize", json={"prompt": long}), param="prompt", code=code)
    assert_refused(server.http.post("/tokenize", json={"messages": [user(long)]}), param="messages", code=code)
    assert_refused(server.post_completion(long, truncate_prompt_tokens=5), param="prompt", code=code)
    assert_refused(server.post_completion(["s1", long], truncate_prompt_tokens=5), param="prompt.1", code=code)
    assert_refused(server.post_chat(long, truncate_prompt_tokens=-1), param="messages", code=code)


def test_of_several_prompts_the_error_names_the_one(server: ScriptedServer):
    for bad in ("", "x" * (20 * WINDOW), "x" * WINDOW):
        assert_refused(server.post_completion(["s1", bad]), param="prompt.1")
    for ids in ([], [1] * (WINDOW + 1), [1] * WINDOW, [10**6]):
        assert_refused(server.post_completion([[1], [2], ids]), param="prompt.2")


# ---------------------------------------------------------------------- A17
def test_a17_a_prompt_that_leaves_no_room(server: ScriptedServer):
    for stream in (False, True):
        for tokens in (WINDOW, WINDOW + 10):
            response = server.post_completion([ord("x")] * tokens, stream=stream)
            error = assert_refused(response, code="context_length_exceeded")
            assert error["message"].startswith(f"This model's maximum context length is {WINDOW} tokens.")
            assert str(tokens) in error["message"]


def test_a17_output_is_clamped_to_the_window(server: ScriptedServer):
    prompt = [*b"long", *[ord(" ")] * (WINDOW - 9)]
    for limit in (100, 2**63, 2**70):
        answer = server.completion(prompt, max_tokens=limit)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 5 and answer["usage"]["total_tokens"] == WINDOW


def test_a17_a_chat_without_a_limit_runs_to_the_window(server: ScriptedServer):
    answer = server.chat("long")
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == WINDOW


def test_a17_the_prompt_is_never_shortened_unless_asked(server: ScriptedServer):
    prompt = [*b"0123456789 s1"]
    server.completion(prompt)
    assert server.executor.prompts[-1] == prompt
    assert server.completion(prompt, truncate_prompt_tokens=2)["usage"]["prompt_tokens"] == 2
    assert server.executor.prompts[-1] == [*b"s1"]
    long = [ord("x")] * WINDOW + [*b"s1"]
    assert server.completion(long, truncate_prompt_tokens=-1, max_tokens=4)["usage"]["prompt_tokens"] == WINDOW - 4
    assert_refused(server.post_completion(prompt, truncate_prompt_tokens=0), param="truncate_prompt_tokens")


# ---------------------------------------------------------------------- A23
def test_a23_limits_by_either_name(server: ScriptedServer):
    def tokens(**limit: int | None) -> int:
        return server.chat("long", **limit)["usage"]["completion_tokens"]

    assert tokens(max_completion_tokens=5) == 5
    assert tokens(max_tokens=5) == 5
    assert tokens(max_completion_tokens=5, max_tokens=9) == 5
    assert tokens(max_completion_tokens=None, max_tokens=9) == 9
    assert server.post_chat("s1", max_tokens=None).status_code == 200
    assert server.completion("long")["usage"]["completion_tokens"] == 16


def test_min_tokens_raises_the_default_of_max_tokens(server: ScriptedServer):
    assert server.completion("long", min_tokens=20)["usage"]["completion_tokens"] == 20
    assert server.completion("long", min_tokens=2)["usage"]["completion_tokens"] == 16
