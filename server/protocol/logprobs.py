"""Log-probabilities on the wire: one shape for chat, another for raw completions. Both are of the model's own
distribution, before temperature, penalties and masks; -9999 stands for minus infinity."""

import codecs
from collections.abc import Sequence
from typing import Any

from engine import Tokenizer, TokenLogprobs

Json = dict[str, Any]


def chat_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int) -> Json:
    """`choices[].logprobs`: an entry a token. The entries' bytes, joined, are the text, also where a character spans
    tokens; a control token that the text leaves out has none."""

    def entry(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        return {"token": _readable(tokenizer, token_id, raw), "logprob": logprob, "bytes": list(raw)}

    content = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        alternatives = list(zip(at.top_ids, at.top_logprobs, strict=True))[:top]
        content.append({**entry(token_id, at.logprob), "top_logprobs": [entry(*pair) for pair in alternatives]})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of one raw completion, delta by delta; `text_offset`: characters before a token."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
        tokens, offsets, tops = [], [], []
        for token_id, at in zip(token_ids, logprobs, strict=True):
            raw = self._tokenizer.token_bytes(token_id)
            tokens.append(_readable(self._tokenizer, token_id, raw))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(raw))
            pairs = {token_id: at.logprob, **dict(list(zip(at.top_ids, at.top_logprobs, strict=True))[: self._top])}
            tops.append({self._name(key): value for key, value in pairs.items()})
        chosen = [at.logprob for at in logprobs]
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token_id: int) -> str:
        return _readable(self._tokenizer, token_id, self._tokenizer.token_bytes(token_id))


def _readable(tokenizer: Tokenizer, token_id: int, raw: bytes) -> str:
    r"""The token as text; a part of a character as '\xe2\x80', a control token by its name."""
    return raw.decode("utf-8", "backslashreplace") if raw else tokenizer.token_text(token_id)
