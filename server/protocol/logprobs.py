"""Log-probabilities on the wire: one shape for chat, another for raw completions. Both are of the model's own
distribution, before temperature, penalties and masks; -9999 stands for minus infinity."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import Tokenizer, TokenLogprobs

Json = dict[str, Any]


@dataclass(frozen=True)
class ShownLogprobs:
    """How many alternatives stand at each token. None: no log-probabilities at all."""

    output: int | None
    prompt: int | None


class TokenSpelling:
    r"""How tokens are written: as text, a part of a character as '\xe2\x80', a control token by its name."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def name(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def raw(self, token_id: int) -> bytes:
        """What the token adds to the text: nothing, where the text leaves control tokens out."""
        if self._skips_special and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


def chat_logprobs(
    spelling: TokenSpelling, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> Json:
    """`choices[].logprobs`: an entry a token. The entries' bytes, joined, are the text, also where a character spans
    tokens."""

    def entry(token_id: int, logprob: float) -> Json:
        return {"token": spelling.name(token_id), "logprob": logprob, "bytes": list(spelling.raw(token_id))}

    content = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        alternatives = [entry(*pair) for pair in _alternatives(at, top)]
        content.append({**entry(token_id, at.logprob), "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of one raw completion, delta by delta; `text_offset`: characters before a token."""

    def __init__(self, spelling: TokenSpelling, top: int) -> None:
        self._spelling = spelling
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> Json:
        """None: nothing comes before that token, so it has no probability."""
        tokens, offsets = [], []
        tops: list[Json | None] = []
        for token_id, at in zip(token_ids, logprobs, strict=True):
            tokens.append(self._spelling.name(token_id))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._spelling.raw(token_id)))
            tops.append(None if at is None else self._tops(token_id, at))
        chosen = [None if at is None else at.logprob for at in logprobs]
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _tops(self, token_id: int, at: TokenLogprobs) -> Json:
        pairs = {token_id: at.logprob, **dict(_alternatives(at, self._top))}
        return {self._spelling.name(key): value for key, value in pairs.items()}


def prompt_logprobs(
    spelling: TokenSpelling, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> list[Json | None]:
    """`prompt_logprobs` in vLLM's shape: a mapping from token id for each prompt token, null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        return {"logprob": logprob, "rank": rank, "decoded_token": spelling.name(token_id)}

    rendered: list[Json | None] = [None]
    for token_id, at in zip(token_ids[1:], logprobs, strict=True):
        ranked = enumerate(_alternatives(at, top), 1)
        alternatives = {str(other): entry(other, logprob, rank) for rank, (other, logprob) in ranked}
        rendered.append({str(token_id): entry(token_id, at.logprob, at.rank), **alternatives})
    return rendered


def _alternatives(at: TokenLogprobs, top: int) -> list[tuple[int, float]]:
    return list(zip(at.top_ids, at.top_logprobs, strict=True))[:top]
