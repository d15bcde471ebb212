"""POST /v1/completions: what goes out. The same object whole and in chunks."""

from collections.abc import Sequence
from typing import Any

from engine import TextDelta, TokenLogprobs
from server.generation import Choice, Usage
from server.protocol.answer import AnswerInfo, Framing, encode
from server.protocol.logprobs import CompletionLogprobs, ShownLogprobs, TokenSpelling, prompt_logprobs


class CompletionAnswer:
    def __init__(
        self, info: AnswerInfo, spelling: TokenSpelling, shown: ShownLogprobs, choices: int, echo: bool
    ) -> None:
        """`choices`: of each prompt; `echo`: each begins with it."""
        self._info = info
        self._spelling = spelling
        self._shown = shown
        self._choices = choices
        self._echo = echo
        self._framing = Framing(info, "text_completion")
        self._begun: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def frames(self, delta: TextDelta, usage: Usage) -> bytes:
        tokens_wanted = self._shown.output is not None or self._info.return_token_ids
        if not (delta.text or delta.finish_reason is not None or (delta.token_ids and tokens_wanted)):
            return b""
        choice = self._choice(delta)
        choice["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return self._framing.frame(encode(choice), usage)

    def last_frames(self, usage: Usage) -> bytes:
        return self._framing.last_frames(usage)

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        rendered = []
        for choice in choices:
            ends = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            rendered.append({**self._choice(choice), **ends})
        answer = self._info.head("text_completion")
        answer["choices"] = rendered
        answer["usage"] = usage.body()
        return encode(answer)

    def _choice(self, part: TextDelta | Choice) -> dict[str, Any]:
        """The whole of a choice, or what a delta adds to it."""
        begins, index = part.index not in self._begun, part.index
        self._begun.add(index)
        prompt = self._info.prompt_token_ids[index // self._choices]
        text, token_ids = part.text, part.token_ids
        logprobs: list[TokenLogprobs | None] = [*(part.logprobs or ())]
        if begins and self._echo:
            text, token_ids = self._spelling.text(prompt) + text, prompt + token_ids
            logprobs = [None, *(part.prompt_logprobs or ()), *logprobs]
        fields: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self._shown.output is not None:
            state = self._logprobs.setdefault(index, CompletionLogprobs(self._spelling, self._shown.output))
            fields["logprobs"] = state.render(token_ids, logprobs)
        if begins and self._shown.prompt is not None:
            scored = part.prompt_logprobs or ()
            fields["prompt_logprobs"] = prompt_logprobs(self._spelling, prompt, scored, self._shown.prompt)
        if self._info.return_token_ids:
            fields["token_ids"] = part.token_ids
            if begins:
                fields["prompt_token_ids"] = prompt
        return fields
