"""POST /v1/completions: what goes out. The same object whole and in chunks."""

from collections.abc import Sequence
from typing import Any

from engine import TextDelta, TokenLogprobs
from server.generation import Choice, Usage
from server.protocol.answer import AnswerInfo, Framing, encode
from server.protocol.logprobs import CompletionLogprobs, TokenSpelling


class CompletionAnswer:
    def __init__(
        self, info: AnswerInfo, spelling: TokenSpelling, top_logprobs: int | None, choices_a_prompt: int
    ) -> None:
        """`top_logprobs`: None without log-probabilities, else the alternatives shown at each token."""
        self._info = info
        self._spelling = spelling
        self._top = top_logprobs
        self._choices_a_prompt = choices_a_prompt
        self._framing = Framing(info, "text_completion")
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def frames(self, delta: TextDelta, usage: Usage) -> bytes:
        tokens_wanted = self._top is not None or self._info.return_token_ids
        if not (delta.text or delta.finish_reason is not None or (delta.token_ids and tokens_wanted)):
            return b""
        choice = self._choice(delta.index, delta.text, delta.token_ids, delta.logprobs or ())
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return self._framing.frame(encode(choice), usage)

    def last_frames(self, usage: Usage) -> bytes:
        return self._framing.last_frames(usage)

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        rendered = []
        for choice in choices:
            fields = self._choice(choice.index, choice.text, choice.token_ids, choice.logprobs)
            ends = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            rendered.append({**fields, **ends})
        answer = self._info.head("text_completion")
        answer["choices"] = rendered
        answer["usage"] = usage.body()
        return encode(answer)

    def _choice(
        self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self._top is not None:
            state = self._logprobs.setdefault(index, CompletionLogprobs(self._spelling, self._top))
            fields["logprobs"] = state.render(token_ids, logprobs)
        if self._info.return_token_ids:
            fields["token_ids"] = token_ids
            if index not in self._begun:
                self._begun.add(index)
                fields["prompt_token_ids"] = self._info.prompt_token_ids[index // self._choices_a_prompt]
        return fields
