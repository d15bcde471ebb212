"""What is asked: the workloads, and their prompts, cut from a text."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

CHARACTERS_A_TOKEN = 4.0
"""Of English, where no server says more."""
MOST_CHARACTERS_A_TOKEN = 64
MAX_CUTS = 12
MIN_CHARACTERS = 10_000


@dataclass(frozen=True)
class Workload:
    """`conversations` of `turns` each, `at_once` of them at a time. Lengths in tokens, drawn from low to high."""

    at_once: int
    conversations: int
    prompt_tokens: tuple[int, int]
    """Of one turn's new text."""
    output_tokens: tuple[int, int]
    shared_tokens: int = 0
    """Of a text before every prompt of a round."""
    turns: int = 1
    """More than one: through the chat endpoint, each turn with all that was said before."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; a chat template's own come on top."""
        return self.shared_tokens + self.turns * (self.prompt_tokens[1] + self.output_tokens[1])

    def __str__(self) -> str:
        what = f"{self.conversations} {'requests' if self.turns == 1 else f'chats of {self.turns} turns'}"
        how = "one after another" if self.at_once == 1 else f"{self.at_once} at once"
        shared = f"{self.shared_tokens:,} shared + " if self.shared_tokens else ""
        return f"{what}, {how}, {shared}{_span(self.prompt_tokens)} tokens in, {_span(self.output_tokens)} out"


WORKLOADS = {
    "W1": Workload(1, 8, (128, 128), (128, 128)),
    "W2": Workload(16, 32, (64, 512), (32, 128)),
    "W3": Workload(8, 32, (30, 30), (32, 32), shared_tokens=1500),
    "W4": Workload(4, 4, (6000, 6000), (64, 64)),
    "turns": Workload(6, 6, (200, 200), (64, 64), turns=5),
}
WARM_UP = Workload(2, 4, (64, 184), (16, 16))


@dataclass(frozen=True)
class Turn:
    prompt: str
    output_tokens: int


Round = list[list[Turn]]
"""The conversations of a workload, each with its turns."""


class Cutter:
    """Cuts prompts from a text, no two from the same place."""

    def __init__(self, text: str, count: Callable[[str], Awaitable[int | None]]) -> None:
        """text: at least `MIN_CHARACTERS`; after its end it begins again. count: tokens of a text, None: unknown."""
        self._text, self._used = text, set[int]()
        self._count: Callable[[str], Awaitable[int | None]] | None = count
        self.characters_a_token = CHARACTERS_A_TOKEN

    async def round(self, workload: Workload, rng: Random) -> Round:
        """Every draw comes before the first wait: the same `rng` and earlier rounds give the same prompts."""
        shared_start = self._start(rng)
        drawn = [
            [
                (self._start(rng), rng.randint(*workload.prompt_tokens), rng.randint(*workload.output_tokens))
                for _ in range(workload.turns)
            ]
            for _ in range(workload.conversations)
        ]
        shared = await self._cut(shared_start, workload.shared_tokens) + "\n" if workload.shared_tokens else ""

        async def turn(start: int, prompt_tokens: int, output_tokens: int) -> Turn:
            return Turn(shared + await self._cut(start, prompt_tokens), output_tokens)

        return await asyncio.gather(*(asyncio.gather(*(turn(*sizes) for sizes in turns)) for turns in drawn))

    def _start(self, rng: Random) -> int:
        start = rng.randrange(len(self._text))
        while start in self._used:
            start = (start + 1) % len(self._text)
        self._used.add(start)
        return start

    async def _cut(self, start: int, tokens: int) -> str:
        """From `start`, as near to `tokens` as `MAX_CUTS` trials come."""
        length = round(tokens * self.characters_a_token)
        low, high = 0, tokens * MOST_CHARACTERS_A_TOKEN  # too short, too long
        best, least = self._piece(start, length), math.inf
        for _ in range(MAX_CUTS):
            piece = self._piece(start, length)
            counted = None if self._count is None else await self._count(piece)
            if not counted:
                self._count = None  # asked once
                break
            if abs(counted - tokens) < least:
                best, least = piece, abs(counted - tokens)
            if counted == tokens:
                break
            low, high = (length, high) if counted < tokens else (low, length)
            length = math.ceil(length * tokens / counted)
            if not low < length < high:
                length = (low + high) // 2
        return best

    def _piece(self, start: int, length: int) -> str:
        repeats = (start + length) // len(self._text) + 1
        return (self._text * repeats)[start : start + length]


def python_text() -> str:
    """The language's reference, as it comes with Python: 600 KB of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _span(tokens: tuple[int, int]) -> str:
    low, high = tokens
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
