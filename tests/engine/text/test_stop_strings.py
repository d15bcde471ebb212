import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.stop_strings import StopMatcher, StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """(texts that went out, stop string)"""
    matcher = StopMatcher(StopStrings(stops), include)
    out = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, matcher.flush()], None


def by_definition(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The first character at which a stop string is complete; of those complete there, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_a01_stop_string_over_many_pieces(include: bool) -> None:
    out, stop = run(["DEFGHIJ"], list("ABCDEFGHIJKL"), include)
    assert stop == "DEFGHIJ"
    assert "".join(out) == ("ABCDEFGHIJ" if include else "ABC")
    assert all("D" not in text for text in out[:-1]), "nothing leaks early"


def test_a01_stop_string_inside_one_piece() -> None:
    assert run(["\n\n"], ["x\n\ny"]) == (["x"], "\n\n")


def test_held_text_is_released_when_it_cannot_match() -> None:
    assert run(["abc"], ["xa", "b", "d"]) == (["x", "", "abd", ""], None)
    assert run(["abc"], ["aab"])[0] == ["a", "ab"]


def test_no_more_than_a_possible_beginning_is_held() -> None:
    matcher = StopMatcher(StopStrings(["<|end|>", "\n\nHuman:"]))
    assert matcher.push("done. <|e")[0] == "done. "
    assert matcher.push("xit\n")[0] == "<|exit"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")
    assert run(["abcd", "bc"], list("abcd"))[1] == "bc"


def test_of_two_complete_at_once_the_longest_wins() -> None:
    assert run(["b", "ab"], ["xab"]) == (["x"], "ab")
    assert run(["ab", "b"], ["xab"]) == (["x"], "ab")


def test_without_stop_strings_text_passes_through() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_a_matcher_starts_afresh_after_flush() -> None:
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.push("xa") == ("x", None)
    assert matcher.flush() == "a"
    assert matcher.push("b") == ("b", None)


def test_unarmed_matches_are_let_through() -> None:
    matcher = StopMatcher(StopStrings(["ab", "abc"]))
    assert matcher.push("xab", armed=False) == ("x", None)
    assert matcher.push("c") == ("x"[:0], "abc"), "it ends in an armed piece, though it began before"
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.push("xab", armed=False) == ("xab", None), "nothing longer can come of it: not held"
    assert matcher.push("ab") == ("", "ab")


ALPHABET = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@st.composite
def split_text(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(ALPHABET)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    return text, [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=500, deadline=None)
@given(STOPS, split_text(), st.booleans())
def test_any_split_gives_what_the_definition_says(
    stops: list[str], split: tuple[str, list[str]], include: bool
) -> None:
    text, pieces = split
    out, stop = run(stops, pieces, include)
    assert ("".join(out), stop) == by_definition(stops, text, include)


@settings(max_examples=300, deadline=None)
@given(STOPS, split_text())
def test_what_is_held_could_become_a_stop_string(stops: list[str], split: tuple[str, list[str]]) -> None:
    matcher, seen, sent = StopMatcher(StopStrings(stops)), "", ""
    for piece in split[1]:
        text, stop = matcher.push(piece)
        seen, sent = seen + piece, sent + text
        if stop is not None:
            return
        held = seen[len(sent) :]
        longest = max(n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops))
        assert len(held) == longest, "exactly the longest end of the text that begins a stop string"
        assert seen == sent + held


@settings(max_examples=200, deadline=None)
@given(STOPS, split_text(), st.integers(0, 8))
def test_arming_late(stops: list[str], split: tuple[str, list[str]], first_armed: int) -> None:
    """Only matches that end in an armed piece count."""
    matcher, seen, out, found = StopMatcher(StopStrings(stops)), "", "", None
    expected = None
    for number, piece in enumerate(split[1]):
        armed = number >= first_armed
        for char in piece:
            seen += char
            complete = [stop for stop in stops if seen.endswith(stop)]
            if armed and complete and expected is None:
                stop = max(complete, key=len)
                expected = (seen[: len(seen) - len(stop)], stop)
        text, found = matcher.push(piece, armed)
        out += text
        if found is not None:
            break
    if found is None:
        out += matcher.flush()
    assert (out, found) == (expected or (seen, None))
