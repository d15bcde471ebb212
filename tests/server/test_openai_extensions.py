"""Fields beyond OpenAI's, sent by the official client as its users send them: in `extra_body`."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from kit import MODEL, ScriptedServer

MESSAGES = [{"role": "user", "content": "s1"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEF"}) as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: str = "s1", **extra: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra)


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **extra: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra)


def test_how_it_ends(client: openai.OpenAI):
    assert complete(client, ignore_eos=True, max_tokens=10).usage.completion_tokens == 10
    assert complete(client, min_tokens=9).usage.completion_tokens >= 9
    [stopped] = complete(client, stop_token_ids=[ord("C")]).choices
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", ord("C"))
    [cut] = chat(client, stop=["CD"], include_stop_str_in_output=True).choices
    assert (cut.message.content, cut.finish_reason, cut.stop_reason) == ("ABCD", "stop", "CD")


def test_token_ids(client: openai.OpenAI, server: ScriptedServer):
    answer = chat(client, return_token_ids=True)
    assert answer.choices[0].token_ids[:6] == [*b"ABCDEF"]
    assert answer.prompt_token_ids == server.executor.prompts[-1]
    [choice] = complete(client, return_token_ids=True).choices
    assert choice.prompt_token_ids == [*b"s1"] and choice.token_ids[:6] == [*b"ABCDEF"]


def test_the_prompt(client: openai.OpenAI, server: ScriptedServer):
    assert complete(client, "a long way to s1", truncate_prompt_tokens=2).usage.prompt_tokens == 2
    assert complete(client, echo=True).choices[0].text == "s1ABCDEF"
    begun = [*MESSAGES, {"role": "assistant", "content": "As for s1"}]
    chat(client, begun, add_generation_prompt=False, continue_final_message=True)
    assert bytes(server.executor.prompts[-1][-9:]) == b"As for s1"


def test_prompt_logprobs(client: openai.OpenAI):
    first, second = complete(client, prompt_logprobs=1).choices[0].prompt_logprobs
    assert first is None and second[str(ord("1"))]["decoded_token"] == "1"
    assert chat(client, prompt_logprobs=0).prompt_logprobs[0] is None


def test_cache_salt_keeps_prompts_apart(client: openai.OpenAI):
    cached = [
        complete(client, "a prompt of several pages: s1", cache_salt=salt).usage.prompt_tokens_details.cached_tokens
        for salt in ("one", "two", "one")
    ]
    assert cached[:2] == [0, 0] and cached[2] > 0


def test_request_id(client: openai.OpenAI):
    assert complete(client, request_id="mine").id == "cmpl-mine"


@pytest.mark.parametrize(
    "field, value",
    [
        ("min_p", 1.5),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("stop_token_ids", [10**6]),
        ("min_tokens", -1),
        ("truncate_prompt_tokens", 0),
        ("cache_salt", ""),
        ("priority", 1),
        ("guided_json", {}),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(client: openai.OpenAI, field: str, value: object):
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **{field: value})
    assert refused.value.param == field and field in refused.value.message


def test_what_nobody_knows_is_ignored(client: openai.OpenAI):
    assert complete(client, a_field_of_tomorrow=1, min_p=None).choices[0].text == "ABCDEF"
