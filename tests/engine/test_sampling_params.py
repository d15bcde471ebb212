"""`SamplingParams` validates itself: each bound holds to the last value inside it, and its refusal names the field."""

from typing import Any

import numpy
import pytest

from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams

LAST: list[tuple[str, Any, Any]] = [
    ("n", 128, 129),
    ("n", 1, 0),
    ("max_tokens", 1, 0),
    ("min_tokens", 0, -1),
    ("temperature", 2.0, 2.01),
    ("temperature", 0.0, -0.01),
    ("top_p", 1.0, 1.01),
    ("top_p", 1e-6, 0.0),
    ("top_k", -1, -2),
    ("min_p", 1.0, 1.01),
    ("repetition_penalty", 100.0, 101.0),
    ("repetition_penalty", 0.01, 0.009),
    ("presence_penalty", -2.0, -2.01),
    ("frequency_penalty", 2.0, float("nan")),
    ("seed", 2**63 - 1, 2**63),
    ("seed", -(2**63), -(2**63) - 1),
    ("logprobs", 20, 21),
    ("logprobs", 0, -1),
    ("stop", ("x",) * 16, ("x",) * 17),
    ("stop", ("x" * 512,), ("x" * 513,)),
    ("stop", ("x",), ("",)),
    ("stop_token_ids", (1,) * 256, (1,) * 257),
    ("logit_bias", dict.fromkeys(range(1024), 1.0), dict.fromkeys(range(1025), 1.0)),
    ("logit_bias", {1: 100.0}, {1: 100.5}),
    ("bad_words", ((1,),) * 256, ((1,),) * 257),
    ("bad_words", ((1,),), ((1,), ())),
    ("allowed_token_ids", tuple(range(65536)), tuple(range(65537))),
    ("allowed_token_ids", (0,), ()),
]


@pytest.mark.parametrize(("field", "inside", "outside"), LAST, ids=lambda value: value if type(value) is str else "")
def test_the_last_value_inside_is_taken_and_the_next_refused(field: str, inside: Any, outside: Any):
    assert getattr(SamplingParams(**{field: inside}), field) == inside
    with pytest.raises(InvalidRequest, match=f"^{field}|stop strings") as refused:
        SamplingParams(**{field: outside})
    assert refused.value.param == field and refused.value.code == "invalid_value"


def test_one_wrong_field_is_one_complaint():
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(max_tokens=-1)
    assert "min_tokens" not in str(error.value)


def test_min_tokens_beyond_max_tokens():
    with pytest.raises(InvalidRequest, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words"])
def test_token_ids_belong_to_the_vocabulary(field: str):
    def params(token: int) -> SamplingParams:
        return SamplingParams(**{field: {"logit_bias": {token: 1.0}, "bad_words": ((token,),)}.get(field, (token,))})

    params(9).check_vocabulary(10)
    for outside in (10, -1):
        with pytest.raises(InvalidRequest, match=f"{field} holds token id {outside}; ids of this model are 0 to 9"):
            params(outside).check_vocabulary(10)


HUGE = 10**5000
"""Python refuses to write it out."""
WRONG_KINDS: list[tuple[str, str, list[Any]]] = [
    ("n", "an integer", [1.5, True, None]),
    ("max_tokens", "an integer", ["3", [3]]),
    ("min_tokens", "an integer", [None]),
    ("top_k", "an integer", [None, 5.0]),
    ("seed", "an integer", [1.0]),
    ("temperature", "a number", ["hot", False, None, {}]),
    ("top_p", "a number", [None.__class__, None, 1j]),
    ("min_p", "a number", [None]),
    ("repetition_penalty", "a number", [None]),
    ("presence_penalty", "a number", [None, "1"]),
    ("ignore_eos", "True or False", ["x", None, 1]),
    ("skip_special_tokens", "True or False", [None, 0]),
    ("stop", "a string or a list of strings", [(1,), 5, None, b"END", [None]]),
    ("stop_token_ids", "a list of token ids", [("a",), 5, None, "12", [[1]], [True]]),
    ("allowed_token_ids", "a list of token ids", [(1.0,), 5, {1: 2}]),
    ("bad_words", "a list of lists of token ids", [("word",), [5], None, 5, [[1.0]], "word"]),
    ("logit_bias", "a number for each token id", [{"5": 1.0}, [1], {1: "x"}, {1: None}, 5, {True: 1.0}]),
]


@pytest.mark.parametrize(
    ("field", "words", "value"), [(field, words, value) for field, words, values in WRONG_KINDS for value in values]
)
def test_values_of_another_kind_are_refused_by_name(field: str, words: str, value: Any):
    with pytest.raises(InvalidRequest, match=rf"^{field} must be {words}, got ") as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field and refused.value.code == "invalid_value"


@pytest.mark.parametrize("field", sorted(SamplingParams.__struct_fields__))
def test_every_field_has_a_kind(field: str):
    with pytest.raises(InvalidRequest, match=rf"^{field} must be ") as refused:
        SamplingParams(**{field: object()})
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", HUGE), ("max_tokens", -HUGE), ("seed", HUGE), ("logit_bias", {1: HUGE}), ("stop", HUGE)],
    ids=lambda value: value if isinstance(value, str) else "huge",
)
def test_a_value_that_cannot_be_written_out_is_refused_too(field: str, value: Any):
    with pytest.raises(InvalidRequest, match=rf"^{field} must be .* a int too large to show"):
        SamplingParams(**{field: value})


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers():
    assert SamplingParams(seed=numpy.int64(3), temperature=numpy.float32(0.5)).seed == 3
