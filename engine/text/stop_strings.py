"""Stop strings, found in text that comes in pieces (A01).

What counts is the text, never where it was cut: the match that is complete first ends the text, and of several complete
at the same character the longest (which begins first). Text that may be the beginning of a stop string is held back, no
more of it than that.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """All stop strings of a request as one automaton (Aho and Corasick, 1975). Shared by a request's choices.

    State s stands for the longest end of the text so far that begins some stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings`: none empty."""
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.match: list[str | None] = [None]
        """Longest stop string complete in this state."""
        self.held = [0]
        """Characters at the end of the text that could still grow into a stop string."""
        for string in strings:
            self._add(string)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _add(self, string: str) -> None:
        state = 0
        for depth, char in enumerate(string, 1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.match.append(None)
                self.held.append(depth)
            state = self._next[state][char]
        self.match[state] = string

    def _link(self) -> None:
        """Breadth first: a state's fallback is nearer to the root than the state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                queue.append(child)
            fallback = self._fail[state]
            self.match[state] = self.match[state] or self.match[fallback]
            if not self._next[state]:  # nothing longer begins so
                self.held[state] = self.held[fallback]


class StopMatcher:
    """One text's way through the automaton."""

    def __init__(self, stops: StopStrings, include_match: bool = False) -> None:
        """`include_match`: the stop string stays in the text."""
        self._stops, self._include_match = stops, include_match
        self._state = 0
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Returns (text that may go out, stop string that ended it). After a match the matcher is done.

        Not `armed`: stop strings that end in this piece are let through.
        """
        if not self._stops:
            return text, None
        start = len(self._held)
        text = self._held + text
        for position in range(start, len(text)):
            self._state = self._stops.step(self._state, text[position])
            match = self._stops.match[self._state]
            if armed and match is not None:
                self._held = ""
                end = position + 1
                return text[: end if self._include_match else end - len(match)], match
        cut = len(text) - self._stops.held[self._state]
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """At the end: what was held back is no stop string."""
        text, self._held = self._held, ""
        self._state = 0
        return text
