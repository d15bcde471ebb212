"""The official client against the real command and a real, if tiny, model: fields that change what is drawn."""

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tiny_models
from served import serving

PROMPT = "The capital of"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("served")
    model = tiny_models.build(folder / "tiny")
    with (
        serving(folder, str(model), "--num-gpu-blocks-override", "64", "--num-threads", "1") as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ids_of(client: openai.OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> list[list[int]]:
    """Each choice's tokens."""
    [model] = client.models.list()
    fields = {"max_tokens": 8, "prompt": PROMPT, "model": model.id, **fields}
    answer = client.completions.create(
        **fields, extra_body={"return_token_ids": True, "ignore_eos": True, **(extra or {})}
    )
    return [choice.token_ids for choice in answer.choices]


def test_a_seed_repeats_and_choices_differ(client: openai.OpenAI):
    first = ids_of(client, seed=7, n=3)
    assert first == ids_of(client, seed=7, n=3) != ids_of(client, seed=8, n=3)
    assert len({tuple(ids) for ids in first}) == 3
    assert ids_of(client, seed=7) == first[:1], "the first of several is the only one of one"


def test_minus_one_is_no_seed_and_other_negative_numbers_are(client: openai.OpenAI):
    assert ids_of(client, seed=-1) != ids_of(client, seed=-1)
    assert ids_of(client, seed=-2) == ids_of(client, seed=-2) != ids_of(client, seed=2)


def test_greedy_is_the_likeliest(client: openai.OpenAI):
    [greedy] = ids_of(client, temperature=0)
    assert [greedy] == ids_of(client, {"top_k": 1}) == ids_of(client, {"min_p": 1.0})


def test_what_may_and_may_not_be_drawn(client: openai.OpenAI):
    assert set(ids_of(client, {"allowed_token_ids": [65, 66]}, max_tokens=30)[0]) == {65, 66}
    assert ids_of(client, logit_bias={"65": 100}, max_tokens=4) == [[65] * 4]
    [[favourite]] = ids_of(client, temperature=0, max_tokens=1)
    assert ids_of(client, temperature=0, max_tokens=1, logit_bias={str(favourite): -100}) != [[favourite]]


def test_logprobs_are_those_of_a_distribution(client: openai.OpenAI):
    [model] = client.models.list()
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(
        model=model.id, messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=5
    )
    for token in answer.choices[0].logprobs.content:
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 5 and tops == sorted(tops, reverse=True)
        assert token.logprob == tops[0] and 0 < sum(map(math.exp, tops)) <= 1 + 1e-6
