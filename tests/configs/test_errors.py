"""Other people's errors inside our sentences."""

import pytest

from configs.errors import reason_of


@pytest.mark.parametrize(
    ("said", "shown"),
    [("It broke.", "It broke"), ("one\n  two..", "one two"), ("", "ValueError"), ("as it is", "as it is")],
)
def test_the_end_of_a_sentence(said: str, shown: str) -> None:
    assert reason_of(ValueError(said)) == shown
