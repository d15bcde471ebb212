"""The official client against the server, as users have it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pydantic
import pytest
from kit import MODEL, ScriptedServer, endless, eventually

KEY = "octavo-secret"
MESSAGES = [{"role": "user", "content": "s1"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    scripts = {"s1": b"ABCDEF", "long": endless, "ill": b"ABC"}
    with ScriptedServer(scripts, api_key=(KEY,), served_model_name=("scripted", "org/scripted-1b")) as server:
        server.executor.fail_after = {"ill": 2}
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, seed=7, stop="E"
    )
    [choice] = answer.choices
    assert choice.message.content == "ABCD" and choice.finish_reason == "stop" and choice.message.role == "assistant"
    assert [entry.token for entry in choice.logprobs.content[:2]] == ["A", "B"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0 and answer.system_fingerprint.startswith("fp_")
    assert answer._request_id
    several = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, max_completion_tokens=4)
    assert [(c.index, c.message.content, c.finish_reason) for c in several.choices] == [
        (n, "ABCD", "length") for n in range(3)
    ]
    assert several.usage.completion_tokens == 12


def test_chat_stream(client: openai.OpenAI):
    options = {"include_usage": True}
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ABCDEF"
    assert chunks[-1].usage.completion_tokens == 7 and chunks[-1].choices == []


def test_stream_helper_accumulates_what_a_whole_answer_has(client: openai.OpenAI):
    fields = {"model": MODEL, "messages": MESSAGES, "n": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion()
    whole = client.chat.completions.create(**fields)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    for ours, theirs in zip(streamed.choices, whole.choices, strict=True):
        assert ours.message.content == theirs.message.content == "ABCDEF"
        assert ours.message.role == "assistant" and ours.finish_reason == theirs.finish_reason == "stop"
        assert [e.token for e in ours.logprobs.content] == [e.token for e in theirs.logprobs.content]


def test_the_stream_helper_tells_what_happens_in_order(client: openai.OpenAI, server: ScriptedServer):
    options = {"include_usage": True}
    fields = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "stop": ["E"], "stream_options": options}

    def read() -> tuple[list[Any], Any]:
        with client.chat.completions.stream(**fields) as stream:
            return list(stream), stream.get_final_completion()

    events, final = server.in_slow_motion(read)
    texts = [(event.delta, event.snapshot) for event in events if event.type == "content.delta"]
    assert [delta for delta, _ in texts if delta] == ["A", "B", "C", "D"] and texts[-1][1] == "ABCD"
    others = [event.type for event in events if event.type not in ("chunk", "content.delta")]
    assert others == ["logprobs.content.delta"] * (len(others) - 2) + ["content.done", "logprobs.content.done"]
    [done] = [event for event in events if event.type == "content.done"]
    assert done.content == final.choices[0].message.content == "ABCD"
    assert final.usage.completion_tokens == final.usage.total_tokens - final.usage.prompt_tokens > 4
    assert events[0].chunk.choices[0].delta.role == "assistant"


def test_usage_may_run_along(client: openai.OpenAI, server: ScriptedServer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"model": MODEL, "prompt": "s1", "stream": True, "stream_options": options}
    chunks = server.in_slow_motion(lambda: list(client.completions.create(**fields)))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5, 6, 7, 7]


def test_completions(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=["s1", "s1 s1"], max_tokens=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["AB", "AB"] and answer.object == "text_completion"
    assert answer.choices[0].logprobs.tokens == ["A", "B"]
    chunks = list(client.completions.create(model=MODEL, prompt="s1", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ABC"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_raw_responses(client: openai.OpenAI):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, extra_headers={"x-request-id": "mine"}, service_tier="flex"
    )
    assert raw.headers["x-request-id"] == "mine" and raw.parse().service_tier == "flex"
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=MESSAGES, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["scripted", "org/scripted-1b"]
    assert client.models.retrieve("org/scripted-1b").id == "org/scripted-1b"
    answer = client.chat.completions.create(model="org/scripted-1b", messages=MESSAGES)
    assert answer.model == "org/scripted-1b"


def test_a16_errors_are_the_classes_users_catch(client: openai.OpenAI, server: ScriptedServer):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model" and missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError) as unknown:
        client.with_options(api_key="wrong").models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model=MODEL, prompt="ill")
    assert failed.value.code == "request_failed"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="s1" * 300)
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.body["message"].startswith("This model's maximum context length is 512 tokens.")
    with pytest.raises(openai.PermissionDeniedError) as closed:
        client.with_options(base_url=f"http://127.0.0.1:{server.port}").get("/load", cast_to=object)
    assert closed.value.type == "permission_error"


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.embeddings.create(model=MODEL, input="x"),
        lambda client: client.responses.create(model=MODEL, input="x"),
        lambda client: client.models.delete("nope"),
    ],
    ids=["embeddings", "responses", "delete"],
)
def test_what_is_not_served_is_said_so(client: openai.OpenAI, call: Callable[[openai.OpenAI], object]):
    with pytest.raises((openai.NotFoundError, openai.APIStatusError)) as error:
        call(client)
    assert error.value.status_code in (404, 405) and error.value.code in ("unknown_url", "method_not_allowed")


class Answer(pydantic.BaseModel):
    word: str


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": Answer}, "response_format"),
        ({"tools": [openai.pydantic_function_tool(Answer)]}, "tools"),
    ],
    ids=["parse", "tools"],
)
def test_what_is_not_built_yet_is_refused_by_name(client: openai.OpenAI, fields: dict[str, object], param: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.parse(model=MODEL, messages=MESSAGES, **fields)
    assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")


def test_a15_an_error_in_a_stream_is_raised(client: openai.OpenAI, server: ScriptedServer):
    def read() -> str:
        text = ""
        try:
            for chunk in client.completions.create(model=MODEL, prompt="ill", stream=True):
                text += chunk.choices[0].text
        except openai.APIError as error:
            return f"{text}: {error.message}"
        return "no error"

    assert server.in_slow_motion(read) == "AB: The script says that this row fails."


def test_a03_leaving_a_stream_ends_the_work(client: openai.OpenAI, server: ScriptedServer):
    server.executor.hold()
    stepping = threading.Thread(target=lambda: server.step_until(lambda: server.context.client.stats.running == 1))
    stepping.start()
    with client.completions.create(model=MODEL, prompt="long", stream=True, max_tokens=500) as stream:
        next(iter(stream))
        stepping.join()
        stream.close()
    eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)
    server.assert_idle()


def test_async_client(server: ScriptedServer):
    async def use() -> tuple[list[str], list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY) as client:
            answers = await asyncio.gather(
                *(client.completions.create(model=MODEL, prompt=f"{n} s1", max_tokens=3) for n in range(6))
            )
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as helper:
                final = await helper.get_final_completion()
            return [answer.choices[0].text for answer in answers], pieces, final.choices[0].message.content

    texts, pieces, final = asyncio.run(use())
    assert texts == ["ABC"] * 6 and "".join(pieces) == final == "ABCDEF"
