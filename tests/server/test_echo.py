"""A21: prompts that come back, with the log-probabilities of their tokens."""

from collections.abc import Iterator

import pytest
from kit import ScriptedServer
from refusals import assert_refused

pytestmark = pytest.mark.usefixtures("idle_afterwards")
PROMPT = "The quick brown fox jumps over the s1"
"""37 tokens: not whole pages."""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABC", "s2": "é!".encode()}, max_num_batched_tokens=8) as server:
        yield server


def test_a21_a_prompt_is_scored_and_nothing_generated(server: ScriptedServer):
    cold, warm = (server.completion(PROMPT, echo=True, logprobs=1, max_tokens=0) for _ in range(2))
    [choice] = cold["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == PROMPT == "".join(logprobs["tokens"]) and choice["finish_reason"] == "length"
    assert len(logprobs["tokens"]) == 37 and logprobs["text_offset"] == list(range(37))
    assert logprobs["token_logprobs"] == [None] + [-0.125] * 36
    assert logprobs["top_logprobs"] == [None] + [{letter: -0.125} for letter in PROMPT[1:]]
    assert cold["usage"]["completion_tokens"] == 0 and cold["usage"]["prompt_tokens"] == 37
    assert warm["choices"] == cold["choices"] and warm["usage"] == cold["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a21_prompt_and_answer_in_one_text(server: ScriptedServer, n: int, stream: bool):
    if stream:
        answer = server.stream_completion(PROMPT, echo=True, logprobs=2, max_tokens=3, n=n)
        for index in range(n):
            assert answer.text(index) == PROMPT + "ABC"
            found = [chunk["logprobs"] for chunk in answer.choices(index)]
            assert [token for one in found for token in one["tokens"]] == [*PROMPT, "A", "B", "C"]
            assert [offset for one in found for offset in one["text_offset"]] == list(range(40))
        return
    for choice in server.completion(PROMPT, echo=True, logprobs=2, max_tokens=3, n=n)["choices"]:
        assert choice["text"] == PROMPT + "ABC" and len(choice["logprobs"]["tokens"]) == 40
        assert choice["logprobs"]["token_logprobs"][0] is None


def test_echo_without_log_probabilities(server: ScriptedServer):
    [choice] = server.completion("é s2", echo=True)["choices"]
    assert choice["text"] == "é s2é!" and choice["logprobs"] is None and "prompt_logprobs" not in choice
    assert server.completion("s1", echo=True, max_tokens=0)["choices"][0]["text"] == "s1"
    two = server.completion(["s1", "x s1"], echo=True, logprobs=0, max_tokens=0)["choices"]
    assert [(one["text"], len(one["logprobs"]["tokens"])) for one in two] == [("s1", 2), ("x s1", 4)]


def test_prompt_logprobs_in_vllms_shape(server: ScriptedServer):
    [choice] = server.completion("as1", prompt_logprobs=2, max_tokens=1)["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None and third.keys() == {"49", "50"} and choice["text"] == "A"
    assert second == {
        "115": {"logprob": -0.125, "rank": 1, "decoded_token": "s"},
        "116": {"logprob": -1.125, "rank": 2, "decoded_token": "t"},
    }
    chat = server.chat("s1", prompt_logprobs=0, return_token_ids=True)
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) and chat["prompt_logprobs"][0] is None


def test_what_cannot_be_is_refused(server: ScriptedServer):
    assert_refused(server.post_completion("s1", max_tokens=0), param="max_tokens", code="invalid_value")
    assert_refused(server.post_completion("s1", prompt_logprobs=21), param="prompt_logprobs")
    assert_refused(server.post_completion("s1", prompt_logprobs=1, stream=True), param="prompt_logprobs")
    assert_refused(server.post_completion([[65] * 500] * 100, prompt_logprobs=20), param="prompt_logprobs")
    assert_refused(server.post_chat("s1", echo=True), param="echo", code="unsupported_parameter")
    assert_refused(server.post_completion([65] * 513, echo=True, max_tokens=0), code="context_length_exceeded")


def test_a_prompt_that_fills_the_window_can_be_scored(server: ScriptedServer):
    ids = [65] * 510 + [115, 49]
    [choice] = server.completion(ids, echo=True, logprobs=0, max_tokens=0)["choices"]
    assert len(choice["logprobs"]["tokens"]) == 512
