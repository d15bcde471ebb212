"""POST /v1/chat/completions: what goes out.

The order of a choice's chunks: role (when its first token exists, not before: clients time the first token by it),
content, an empty delta with the finish reason.
"""

from collections.abc import Sequence
from typing import Any

from engine import TextDelta, TokenLogprobs
from server.generation import Choice, Usage
from server.protocol.answer import AnswerInfo, Framing, encode
from server.protocol.logprobs import ShownLogprobs, TokenSpelling, chat_logprobs, prompt_logprobs


class ChatAnswer:
    def __init__(self, info: AnswerInfo, spelling: TokenSpelling, shown: ShownLogprobs) -> None:
        self._info = info
        self._spelling = spelling
        self._top = shown.output
        self._prompt_top = shown.prompt
        self._framing = Framing(info, "chat.completion.chunk")
        self._begun: set[int] = set()

    def frames(self, delta: TextDelta, usage: Usage) -> bytes:
        frames = b""
        if delta.index not in self._begun:
            frames += self._role(delta.index, usage)
        if delta.text or (delta.token_ids and (self._top is not None or self._info.return_token_ids)):
            frames += self._framing.frame(self._content(delta), usage)
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            frames += self._framing.frame(self._choice(delta.index, b"{}", b"null", encode(end)[1:-1]), usage)
        return frames

    def last_frames(self, usage: Usage) -> bytes:
        return self._framing.last_frames(usage)

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        answer = self._info.head("chat.completion")
        answer["choices"] = [self._whole(choice) for choice in choices]
        answer["usage"] = usage.body()
        prompt = self._info.prompt_token_ids[0]
        if self._info.return_token_ids:
            answer["prompt_token_ids"] = prompt
        if self._prompt_top is not None:
            scored = choices[0].prompt_logprobs or ()
            answer["prompt_logprobs"] = prompt_logprobs(self._spelling, prompt, scored, self._prompt_top)
        return encode(answer)

    def _role(self, index: int, usage: Usage) -> bytes:
        extra = b""
        if self._info.return_token_ids and not self._begun:
            extra = b',"prompt_token_ids":' + encode(self._info.prompt_token_ids[0])
        self._begun.add(index)
        choice = self._choice(index, b'{"role":"assistant","content":""}', b"null", b'"finish_reason":null')
        return self._framing.frame(choice, usage, extra)

    def _content(self, delta: TextDelta) -> bytes:
        rest = b'"finish_reason":null'
        if self._info.return_token_ids:
            rest += b',"token_ids":' + encode(delta.token_ids)
        logprobs = self._logprobs(delta.token_ids, delta.logprobs or ())
        return self._choice(delta.index, b'{"content":' + encode(delta.text) + b"}", encode(logprobs), rest)

    @staticmethod
    def _choice(index: int, delta: bytes, logprobs: bytes, rest: bytes) -> bytes:
        return b'{"index":%d,"delta":%b,"logprobs":%b,%b}' % (index, delta, logprobs, rest)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return None if self._top is None else chat_logprobs(self._spelling, token_ids, logprobs, self._top)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._info.return_token_ids:
            fields["token_ids"] = choice.token_ids
        return fields
