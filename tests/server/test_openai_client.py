"""The official client against the server, as users have it."""

import asyncio
import threading
from collections.abc import Iterator

import openai
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


def test_a_request_that_cannot_succeed_is_not_repeated(client: openai.OpenAI, server: ScriptedServer):
    before = server.context.metrics.requests_finished["error"]
    with pytest.raises(openai.InternalServerError):
        client.with_options(max_retries=3).completions.create(model=MODEL, prompt="ill")
    assert server.context.metrics.requests_finished["error"] == before + 1


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


def test_overload_is_worth_another_try(server: ScriptedServer, client: openai.OpenAI):
    """The client waits as long as Retry-After says and is then served."""
    with ScriptedServer({"s1": b"AB", "long": endless}, max_num_seqs=1, max_num_queued_reqs=0, window=2000) as busy:
        busy.executor.hold()
        retrying = openai.OpenAI(base_url=f"http://127.0.0.1:{busy.port}/v1", api_key="none", max_retries=2)
        with busy.open_request("long"), retrying:
            busy.step_until(lambda: busy.context.client.stats.running == 1)
            refused = retrying.with_options(max_retries=0).completions.with_raw_response
            with pytest.raises(openai.InternalServerError) as error:
                refused.create(model=MODEL, prompt="s1")
            assert error.value.status_code == 503 and error.value.code == "overloaded"

            def make_room() -> None:
                eventually(lambda: busy.context.metrics.rejections["max_num_queued_reqs"] == 2)
                busy.executor.allow(None)

            threading.Thread(target=make_room).start()
            assert retrying.completions.create(model=MODEL, prompt="s1").choices[0].text == "AB"
