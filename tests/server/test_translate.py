"""OpenAI's words to ours: sampling parameters, bad words, deadlines."""

import json
import math
import threading
from typing import Any

import pytest
from bytetok import FIRST_WORD, byte_tokenizer
from kit import ScriptedServer

from engine.client import EngineClient
from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams
from engine.served_model import ServedModel
from engine.text.chat_template import ChatRenderer
from server import translate
from server.protocol.body import parse
from server.protocol.chat import ChatBody
from server.protocol.logprobs import ShownLogprobs

NOTHING = ShownLogprobs(None, None)


class Client(EngineClient):
    """Only what translation reads: no engine, no sockets."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model


def client(words: tuple[str, ...] = (), **defaults: float) -> Client:
    tokenizer = byte_tokenizer(words)
    return Client(ServedModel(("m",), tokenizer, ChatRenderer(tokenizer), defaults))


def params(body: dict[str, Any], limit: int | None = None, on: Client | None = None) -> SamplingParams:
    fields = {"messages": [{"role": "user", "content": "x"}], **body}
    return translate.sampling_params(
        on or client(), parse(ChatBody, json.dumps(fields).encode()), limit, "max_tokens", NOTHING
    )


def test_neutral_values_where_nobody_says_anything():
    assert params({}) == SamplingParams(max_tokens=None)


def test_the_models_defaults_stand_until_the_request_says_otherwise():
    model = client(temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.1, max_tokens=64)
    chosen = params({}, on=model)
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.repetition_penalty) == (0.7, 0.9, 40, 1.1)
    assert chosen.max_tokens == 64
    said = params({"temperature": 0, "top_p": 1, "top_k": 0, "repetition_penalty": 1}, limit=5, on=model)
    assert said == SamplingParams(temperature=0, max_tokens=5)


def test_every_field_arrives():
    body = {
        "n": 2, "min_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 7, "stop": ["a", "b"], "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True, "allowed_token_ids": [3], "ignore_eos": True, "skip_special_tokens": False,
        "logit_bias": {"5": -1.5},
    }  # fmt: skip
    expected = {
        **body,
        "stop": ("a", "b"),
        "stop_token_ids": (1, 2),
        "allowed_token_ids": (3,),
        "logit_bias": {5: -1.5},
    }
    assert params(body, limit=9) == SamplingParams(max_tokens=9, **expected)


@pytest.mark.parametrize("key", ["abc", "", "1.5", "0x1", "١x"])
def test_logit_bias_maps_token_ids(key: str):
    with pytest.raises(InvalidRequest) as error:
        params({"logit_bias": {key: 1}})
    assert error.value.param == "logit_bias"


def test_bad_words_are_forbidden_with_and_without_a_space():
    # In bytes a leading space is a token of its own, so the spaced form is longer and the plain one covers it.
    assert params({"bad_words": ["ab"]}).bad_words == ((97, 98),)
    with_words = client(("ab", " ab"))
    assert params({"bad_words": ["ab", " ab"]}, on=with_words).bad_words[0] in (((97, 98)), (FIRST_WORD,))
    with pytest.raises(InvalidRequest):
        params({"bad_words": [""]})


def test_bad_words_that_are_one_token_either_way(monkeypatch: pytest.MonkeyPatch):
    model = client()
    monkeypatch.setattr(model.model.tokenizer, "encode_plain", lambda text: [{"ab": 1, " ab": 2}.get(text, 3)])
    assert params({"bad_words": ["ab"]}, on=model).bad_words == ((1,), (2,))


def test_deadlines_from_the_openai_clients(monkeypatch: pytest.MonkeyPatch):
    seen = []
    with ScriptedServer({"s1": b"A"}, scheduling_policy="priority") as server:
        submit = server.context.client.submit

        async def spy(prompts, params, envelope):
            seen.append(envelope)
            return await submit(prompts, params, envelope)

        monkeypatch.setattr(server.context.client, "submit", spy)
        for header in ("600", "0.5", "nan", "inf", "-1", "not-given", ""):
            server.post_completion("s1", headers={"x-stainless-read-timeout": header})
        server.post_completion("s1", stream=True, headers={"x-stainless-read-timeout": "600"})
        server.post_completion("s1", priority=-3, service_tier="flex")
        server.post_completion("s1", service_tier="priority")
        server.post_completion(["s1", "s1"], priority=4)
    assert [envelope.deadline is not None and math.isfinite(envelope.deadline) for envelope in seen[:7]] == [
        True, True, False, False, False, False, False,
    ]  # fmt: skip
    assert seen[7].deadline is None, "comment lines keep a stream's reader waiting"
    assert [envelope.priority for envelope in seen[8:]] == [-3, -1, 4]
    assert len({envelope.request_id for envelope in seen}) == len(seen)


def test_a_priority_needs_the_policy():
    with ScriptedServer({"s1": b"A"}) as server:
        refused = server.post_completion("s1", priority=1)
        assert refused.status_code == 400 and "--scheduling-policy priority" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "priority"
        for harmless in ({"priority": 0}, {"service_tier": "priority"}, {"service_tier": "flex"}):
            assert server.post_completion("s1", **harmless).status_code == 200


@pytest.mark.parametrize("biases", [{"--5": 1}, {"5" * 5000: 1}, {"5": 1, "05": 2}, {"٥": 1}, {"5\n": 1}, {"5": True}])
def test_logit_bias_keys_are_strict(biases: dict[str, float]):
    with pytest.raises(InvalidRequest) as error:
        params({"logit_bias": biases})
    assert (error.value.param or "").startswith("logit_bias")


def test_allowed_token_ids_are_bounded_and_without_doubles():
    assert params({"allowed_token_ids": [3, 5, 3, 3]}).allowed_token_ids == (3, 5)
    with pytest.raises(InvalidRequest) as error:
        params({"allowed_token_ids": [3] * 65537})
    assert error.value.param == "allowed_token_ids"
    with pytest.raises(InvalidRequest, match="at most 65536"):
        SamplingParams(allowed_token_ids=tuple(range(65537)))


def test_allowed_tokens_must_not_all_be_masked_by_min_tokens():
    end = client().tokenizer.eos_token_ids[0]
    for body in ({"allowed_token_ids": [end]}, {"allowed_token_ids": [end, 7], "stop_token_ids": [7]}):
        with pytest.raises(InvalidRequest) as error:
            params({**body, "min_tokens": 1})
        assert error.value.param == "allowed_token_ids"
        assert params(body).min_tokens == 0
    assert params({"allowed_token_ids": [end, 7], "min_tokens": 1}).allowed_token_ids == (end, 7)


def test_bad_words_are_of_bounded_length():
    assert len(params({"bad_words": ["x" * 512]}).bad_words[0]) == 512
    with pytest.raises(InvalidRequest, match="512") as error:
        params({"bad_words": ["x" * 513]})
    assert error.value.param == "bad_words"


@pytest.mark.parametrize("value", [0.001, 0, -1, 100.5])
def test_repetition_penalty_has_a_range(value: float):
    with pytest.raises(InvalidRequest) as error:
        params({"repetition_penalty": value})
    assert error.value.param == "repetition_penalty"
    assert params({"repetition_penalty": 0.01}).repetition_penalty == 0.01


@pytest.mark.parametrize("field", ["max_tokens", "n", "temperature", "top_k", "seed", "priority", "top_logprobs"])
@pytest.mark.parametrize("value", [True, "1"])
def test_booleans_and_strings_are_not_numbers(field: str, value: Any):
    with pytest.raises(InvalidRequest) as error:
        params({field: value})
    assert error.value.param == field
    params({field: 1.0})


def test_numbers_of_any_length_are_refused_in_words():
    for field in ("n", "seed", "max_tokens", "top_k", "temperature", "stop_token_ids"):
        digits = "9" * 4000
        raw = f'{{"messages": [], "{field}": {f"[{digits}]" if field == "stop_token_ids" else digits}}}'
        with pytest.raises(InvalidRequest):
            parse(ChatBody, raw.encode())


def test_service_tiers_are_the_documented_ones():
    params({"service_tier": "flex"})
    with pytest.raises(InvalidRequest) as error:
        params({"service_tier": "x" * 1000})
    assert error.value.param == "service_tier" and len(error.value.message) < 200


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"chat_template_kwargs": {"notes": ["x" * 50] * 40}},
        {"messages": [{"role": "user", "content": "s1", "context": [{"deep": "x" * 2000}]}]},
    ],
    ids=["short", "template arguments", "a message's own keys"],
)
def test_a_conversation_with_much_in_it_is_rendered_off_the_loop(extra: dict[str, Any]):
    threads = []
    with ScriptedServer({"s1": b"A"}) as server:
        chat = server.context.client.chat
        render = chat.render

        def spy(*args: Any, **fields: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return render(*args, **fields)

        chat.render = spy
        body = {"messages": [{"role": "user", "content": "s1"}], "max_tokens": 1, **extra}
        for path in ("/v1/chat/completions", "/tokenize"):
            assert server.http.post(path, json=body).status_code == 200
    assert [name == "kit-http" for name in threads] == [not extra] * 2
