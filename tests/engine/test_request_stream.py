"""What waits for a reader that lags: bounded, in order, complete."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestFailed
from engine.messages import TextDelta
from engine.request_stream import RequestStream


def make() -> RequestStream:
    return RequestStream(lambda sequences: None, prompt_tokens=1)


def test_interleaved_choices_wait_as_one_delta_each():
    async def run() -> list[TextDelta]:
        stream = make()
        for token in range(1000):
            for index in range(4):
                stream.deliver(TextDelta(index, chr(97 + index), [token]))
        stream.fail(RequestFailed("the end"))
        waiting = []
        try:
            async for delta in stream:
                waiting.append(delta)
        except RequestFailed:
            return waiting
        raise AssertionError("the error never came")

    waiting = asyncio.run(run())
    assert [delta.index for delta in waiting] == [0, 1, 2, 3]
    assert [delta.text for delta in waiting] == [chr(97 + index) * 1000 for index in range(4)]
    assert all(delta.token_ids == list(range(1000)) for delta in waiting)


@given(st.lists(st.one_of(st.integers(0, 2), st.none()), max_size=30))
@settings(max_examples=60, deadline=None)
def test_whatever_the_reader_does_every_choice_gets_its_text_in_order(moves: list[int | None]):
    """A number delivers to that choice, None reads once if there is something to read."""

    async def run() -> None:
        stream, sent, read = make(), ["", "", ""], ["", "", ""]

        async def take() -> None:
            delta = await anext(stream)
            read[delta.index] += delta.text

        for number, move in enumerate(moves):
            if move is not None:
                stream.deliver(TextDelta(move, f"{number},", [number]))
                sent[move] += f"{number},"
            elif read != sent:
                await take()
        while read != sent:
            await take()

    asyncio.run(run())
