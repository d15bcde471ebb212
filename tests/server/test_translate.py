"""OpenAI's words to ours: sampling parameters, bad words, deadlines."""

import json
import math
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
        on or client(), parse(ChatBody, json.dumps(fields).encode()), limit, "max_tokens", None
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
    with ScriptedServer({"s1": b"A"}) as server:
        submit = server.context.client.submit

        async def spy(prompt, params, envelope):
            seen.append(envelope)
            return await submit(prompt, params, envelope)

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
    assert [envelope.priority for envelope in seen[8:]] == [-3, -1, 4, 4]
    assert len({envelope.request_id for envelope in seen}) == len(seen)
