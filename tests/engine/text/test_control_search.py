"""Control tokens are looked for piece by piece, and found as if the text were searched at once."""

import re

import pytest
from bytetok import CHATML, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import tokenizer as module
from engine.text.chat_template import ChatRenderer

TOKENIZER = byte_tokenizer(template=CHATML)
CONTROL = sorted(TOKENIZER._control)
texts = st.lists(st.sampled_from([*CONTROL, *(token[:-1] for token in CONTROL), "<", "<|", "x", "|>"])).map("".join)


@given(text=st.lists(st.sampled_from(["<a|b>", *"<a|b>"])).map("".join), piece=st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_pieces_find_what_one_search_finds(text: str, piece: int):
    """Where tokens begin like others and end like others, too."""
    longest_first = ["<a|b>", "<a|b", "|b>", "<a", "b>"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        patch.setattr(TOKENIZER, "_longest_control", 5)
        patch.setattr(TOKENIZER, "_control_pattern", re.compile("|".join(map(re.escape, longest_first))))
        found = [match.span() for match in TOKENIZER.find_control(text)]
        assert found == [match.span() for match in TOKENIZER._control_pattern.finditer(text)]


def test_no_search_covers_more_than_a_piece(monkeypatch: pytest.MonkeyPatch):
    """What one search covers, the interpreter's lock is held for."""
    covered = []

    class Pattern:
        def search(self, text: str, start: int, end: int) -> None:
            covered.append(end - start)

    monkeypatch.setattr(TOKENIZER, "_control_pattern", Pattern())
    assert list(TOKENIZER.find_control("<" * (3 * module.PIECE + 5))) == []
    assert len(covered) == 4 and max(covered) < module.PIECE + max(map(len, CONTROL))


@given(text=texts, piece=st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_the_size_of_a_piece_changes_no_rendering(text: str, piece: int):
    chat = ChatRenderer(TOKENIZER)
    messages = [{"role": "user", "content": text + "x"}]
    whole = chat.render(messages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        patch.setattr("engine.text.chat_template.PIECE", piece)
        assert chat.render(messages) == whole
