"""What `octavo bench` asks: prompts cut to their tokens, which the seed alone decides."""

from random import Random
from typing import Any

import pytest

from server.bench.workloads import WORKLOADS, Cutter, python_text


class Words:
    """Counts a text's words, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, text: str) -> int | None:
        self.asked += 1
        return len(text.split())


async def prompts(seed: str, count: Any, text: str | None = None) -> list[str]:
    cutter = Cutter(text or python_text(), count)
    return [
        turn.prompt
        for name in ("W2", "turns")
        for turns in await cutter.round(WORKLOADS[name], Random(seed))
        for turn in turns
    ]


@pytest.mark.anyio
async def test_the_seed_alone_decides_the_prompts():
    one, same, other = await prompts("1", Words()), await prompts("1", Words()), await prompts("2", Words())
    assert one == same and not set(one) & set(other) and len(set(one)) == len(one) == 62


@pytest.mark.anyio
async def test_prompts_have_the_tokens_that_were_asked_for():
    """Also where a table stands beside what is long for its tokens: what the average says overshoots, to and fro."""
    cutter = Cutter(("1 " * 100 + "x" * 600 + " ") * 50, words := Words())
    for turn in [turn for turns in await cutter.round(WORKLOADS["W1"], Random(1)) for turn in turns]:
        assert await words(turn.prompt) in (127, 128, 129)
    [[longest], *_] = await cutter.round(WORKLOADS["W4"], Random(1))
    assert 5_990 <= await words(longest.prompt) <= 6_010


@pytest.mark.anyio
async def test_prompts_begin_at_different_places_of_a_short_text():
    cutter = Cutter("".join(map(chr, range(0x4E00, 0x4E00 + 200))), Words())
    for _ in range(4):
        await cutter.round(WORKLOADS["W2"], Random(1))
    firsts = [turn.prompt[0] for turns in await cutter.round(WORKLOADS["W2"], Random(1)) for turn in turns]
    assert len(set(firsts)) == 32
