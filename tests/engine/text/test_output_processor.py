import pytest
from bytetok import EOS, FIRST_WORD, IM_END, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import TextDelta, Timings, TokenLogprobs, TokenOutput
from engine.sampling_params import SamplingParams
from engine.text.output_processor import OutputProcessor
from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer

BYTES = byte_tokenizer(["x\n\ny", "END"])
X_NEWLINES_Y, END = FIRST_WORD, FIRST_WORD + 1


def feed(
    ids: list[int], params: SamplingParams, finish: str | None = "stop", step: int = 1, tokenizer: Tokenizer = BYTES
) -> tuple[OutputProcessor, list[TextDelta]]:
    """Pushes `ids`, `step` at a time, as an engine does that stops after the last one."""
    processor = OutputProcessor(tokenizer, params)
    deltas = []
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        last = start + step >= len(ids)
        logprobs = [TokenLogprobs(-float(token), 1, [], []) for token in part] if params.logprobs is not None else None
        delta = processor.push(TokenOutput("r", part, logprobs, finish if last else None))
        if delta is not None:
            deltas.append(delta)
    return processor, deltas


def text(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids(deltas: list[TextDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_a01_stop_string_over_tokens(step: int) -> None:
    script = [*b"ABCDEFGHIJKL", EOS]
    processor, deltas = feed(script, SamplingParams(stop=("DEFGHIJ",)), step=step)
    assert text(deltas) == "ABC"
    assert all("D" not in delta.text for delta in deltas), "nothing leaks early"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "DEFGHIJ")
    assert ids(deltas) == [*b"ABCDEFGHIJ"] and processor.num_tokens == 10, "what comes after it is not published"
    assert processor.must_abort == (step < 100), "unless the engine had ended the sequence in the same step"
    _, kept = feed(script, SamplingParams(stop=("DEFGHIJ",), include_stop_str_in_output=True), step=step)
    assert text(kept) == "ABCDEFGHIJ"


def test_a01_stop_string_inside_a_token() -> None:
    processor, deltas = feed([X_NEWLINES_Y, 65, EOS], SamplingParams(stop=("\n\n",)))
    assert text(deltas) == "x" and processor.must_abort
    assert ids(deltas) == [X_NEWLINES_Y]


@pytest.mark.parametrize("step", [1, 2, 100])
def test_a02_cut_inside_a_character(step: int) -> None:
    _, deltas = feed(list("👍".encode()[:2]), SamplingParams(), finish="length", step=step)
    assert [delta.text for delta in deltas] == ["\ufffd"]
    assert deltas[-1].finish_reason == "length" and ids(deltas) == list("👍".encode()[:2])


def test_a02_stream() -> None:
    _, deltas = feed([*"👍é漢 ok".encode(), EOS], SamplingParams())
    assert text(deltas) == "👍é漢 ok" and not any("\ufffd" in delta.text for delta in deltas)
    assert deltas[0].token_ids == list("👍".encode()), "tokens come with the text they make"


def test_a25_stop_tokens_do_not_show() -> None:
    script = [72, 105, IM_END]
    assert text(feed(script, SamplingParams())[1]) == "Hi"
    assert text(feed(script, SamplingParams(skip_special_tokens=False))[1]) == "Hi<|im_end|>"
    shown = SamplingParams(skip_special_tokens=False, ignore_eos=True)
    assert text(feed([*script, 33], shown, finish="length")[1]) == "Hi<|im_end|>!"
    assert text(feed([*script, 33], SamplingParams(ignore_eos=True), finish="length")[1]) == "Hi!"


def test_an_ordinary_token_as_stop_token() -> None:
    output = TokenOutput("r", [72, END], finish_reason="stop", stop_reason=END)
    delta = OutputProcessor(BYTES, SamplingParams(stop_token_ids=(END,))).push(output)
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("H", [72, END], END)
    kept = SamplingParams(stop_token_ids=(END,), include_stop_str_in_output=True)
    assert OutputProcessor(BYTES, kept).push(output).text == "HEND"  # type: ignore[union-attr]


def test_min_tokens_holds_stop_strings_off() -> None:
    """As vLLM: a stop string counts when the token that completes it is past min_tokens."""
    script = [*b"a.b.c", EOS]
    assert text(feed(script, SamplingParams(stop=(".",)))[1]) == "a"
    assert text(feed(script, SamplingParams(stop=(".",), min_tokens=1))[1]) == "a"
    assert text(feed(script, SamplingParams(stop=(".",), min_tokens=2))[1]) == "a.b"
    assert text(feed(script, SamplingParams(stop=(".",), min_tokens=4))[1]) == "a.b.c"
    assert text(feed(script, SamplingParams(stop=(".b",), min_tokens=2))[1]) == "a"


def test_logprobs_stay_in_step_with_tokens() -> None:
    _, deltas = feed([*"é漢!".encode(), EOS], SamplingParams(logprobs=0))
    for delta in deltas:
        assert delta.logprobs is not None
        assert [entry.logprob for entry in delta.logprobs] == [-float(token) for token in delta.token_ids]
    assert ids(deltas) == [*"é漢!".encode(), EOS]
    assert feed([65, EOS], SamplingParams())[1][0].logprobs is None


def test_no_empty_deltas_but_the_last() -> None:
    processor = OutputProcessor(BYTES, SamplingParams())
    first, rest = "é".encode()[:1], "é".encode()[1:]
    assert processor.push(TokenOutput("r", [*first])) is None
    assert processor.push(TokenOutput("r", [IM_END])) is None, "a skipped token has no text"
    delta = processor.push(TokenOutput("r", [*rest]))
    assert delta is not None and (delta.text, delta.token_ids) == ("é", [*first, IM_END, *rest])
    end = processor.push(TokenOutput("r", [EOS], finish_reason="stop"))
    assert end is not None and (end.text, end.token_ids, end.finish_reason) == ("", [EOS], "stop")
    assert processor.finished and not processor.must_abort
    assert processor.push(TokenOutput("r", [65])) is None and processor.num_tokens == 4


@pytest.mark.parametrize("finish", ["length", "abort", "error"])
def test_held_text_comes_out_at_any_end(finish: str) -> None:
    processor, deltas = feed([*b"so STO"], SamplingParams(stop=("STOP",)), finish=finish)
    assert text(deltas) == "so STO" and deltas[-1].finish_reason == finish and not processor.must_abort


def test_an_error_carries_its_words() -> None:
    delta = OutputProcessor(BYTES, SamplingParams()).push(
        TokenOutput("r", [], finish_reason="error", error="non-finite logits")
    )
    assert delta is not None and (delta.finish_reason, delta.error, delta.text) == ("error", "non-finite logits", "")


def test_a_broken_end_can_complete_a_stop_string() -> None:
    _, deltas = feed([65, 0xF0], SamplingParams(stop=("\ufffd",)), finish="length")
    assert (text(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == ("A", "stop", "\ufffd")


def test_numbers_of_the_first_output_reach_the_reader() -> None:
    """They wait for the first delta, wherever that is, and are not lost with a token that has no text yet."""
    processor = OutputProcessor(BYTES, SamplingParams(), index=3)
    first, *rest = "é".encode()
    processor.push(TokenOutput("r", [first], cached_tokens=7, timings=Timings(1.0, 2.0)))
    delta = processor.push(TokenOutput("r", rest, num_preemptions=1))
    assert delta is not None
    assert (delta.index, delta.cached_tokens, delta.num_preemptions) == (3, 7, 1)
    assert delta.timings == Timings(1.0, 2.0)
    end = processor.push(TokenOutput("r", [EOS], finish_reason="stop", timings=Timings(1.0, 2.0, 3.0, 4.0)))
    assert end is not None and end.timings == Timings(1.0, 2.0, 3.0, 4.0) and end.cached_tokens == 7


def test_choices_share_an_automaton() -> None:
    params = SamplingParams(stop=("b",), n=2)
    stops = StopStrings(params.stop)
    one, two = (OutputProcessor(BYTES, params, index=i, stops=stops) for i in range(2))
    assert one.push(TokenOutput("r", [*b"ab"])).text == "a"  # type: ignore[union-attr]
    assert two.push(TokenOutput("r", [*b"aa"])).text == "aa"  # type: ignore[union-attr]


@settings(max_examples=200, deadline=None)
@given(
    script=st.lists(st.sampled_from([*b"ab.", *"é".encode(), 0xFF, IM_END, X_NEWLINES_Y, END]), max_size=20),
    stops=st.lists(st.text("ab.é\n", min_size=1, max_size=3), max_size=3),
    step=st.integers(1, 5),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_any_grouping_of_tokens_gives_the_same(
    script: list[int], stops: list[str], step: int, include: bool, min_tokens: int
) -> None:
    """One token a step, or several (speculation): the same text, tokens, end."""
    params = SamplingParams(
        stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=64, logprobs=0
    )
    outcomes = []
    for width in (1, step, 100):
        processor, deltas = feed([*script, EOS], params, step=width)
        assert all(delta.text or delta is deltas[-1] for delta in deltas)
        assert sum(delta.finish_reason is not None for delta in deltas) == 1 == (deltas[-1].finish_reason is not None)
        assert ids(deltas) == [*script, EOS][: processor.num_tokens]
        end = deltas[-1]
        outcomes.append((text(deltas), ids(deltas), end.finish_reason, end.stop_reason))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    if outcomes[0][3] is None:
        assert outcomes[0][0] == BYTES.decode(script)
