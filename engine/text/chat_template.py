"""A conversation to the model's token ids, by the model's chat template (A18, A19, A25).

A template writes control tokens (`<|im_start|>`), and so may anybody who writes a message. Only the template's are
meant. So where a message holds the text of a control token, the conversation is rendered a second time with marks
around those texts; the marks tell which control tokens of the rendering somebody typed, and these are encoded as words.
A conversation without such texts gives the ids that transformers' `apply_chat_template(tokenize=True)` gives.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError

from engine.errors import InvalidRequest, StartupError, reason_of
from engine.text.chat_messages import Message, TemplateTraits, normalize_messages, plain_json, with_parts
from engine.text.template_environment import RaisedByTemplate, make_environment
from engine.text.tokenizer import PIECE, Tokenizer
from engine.text.tokenizer_files import NAMED_TOKENS

MAX_RENDERED_CHARS = 1 << 24
"""Longer than any context window; stops a template that runs away."""
MARKS = range(0xF0000, 0xFFFFE)
"""Private-use characters, two of which serve as marks: a pair that occurs nowhere in the conversation."""
CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
RESERVED = {
    "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template", "conversation",
    "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "self", *NAMED_TOKENS,
}  # fmt: skip
"""Names that a request's template arguments must not take."""


@dataclass(frozen=True)
class _Chat:
    """What one rendering is given. All plain JSON."""

    messages: list[Message]
    tools: list[Any] | None
    arguments: dict[str, Any]
    add_generation_prompt: bool
    continues: bool
    traits: TemplateTraits


class ChatRenderer:
    """One template of one model. Renderings share nothing, so threads may call at the same time."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        """`template`: instead of the model's own. Raises `StartupError` where it is no valid Jinja."""
        self._tokenizer = tokenizer
        source = template if template is not None else tokenizer.chat_template
        self.has_template = source is not None
        environment = make_environment()
        self._reserved = RESERVED | environment.globals.keys()
        try:
            self._template = environment.from_string(source or "")
        except TemplateError as error:
            raise StartupError(f"--chat-template: the chat template is not valid: {reason_of(error)}.") from None
        self.traits = self._probe(source or "")

    # ------------------------------------------------------------------ public
    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        window: int | None = None,
        must_fit: bool = True,
    ) -> list[int]:
        """Token ids of the conversation; BOS where the template writes it.

        `continue_final_message` ends inside the last message, for the model to go on with it. Raises
        `ContextLengthExceeded` where the text certainly exceeds `window` tokens (None: no limit; with `must_fit`
        alone), `InvalidRequest` for messages that cannot be taken, for a template that refuses them or fails, where
        there is no template, and for more text than is tokenised at once.
        """
        chat = self._chat(messages, add_generation_prompt, continue_final_message, tools, template_kwargs)
        text = self._render_all(chat)
        if must_fit:
            self._tokenizer.check_fits(text, window)
        self._tokenizer.check_length(text, window)
        if not self._holds_control_text(chat):
            return self._tokenizer.encode_trusted(text)
        return self._tokenizer.encode_trusted(*self._attribute(chat, text))

    def render_text(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The rendering as text: for people. Which control tokens are meant is lost in it."""
        chat = self._chat(messages, add_generation_prompt, continue_final_message, tools, template_kwargs)
        return self._render_all(chat)

    # ------------------------------------------------------------------ input
    def _chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> _Chat:
        if not self.has_template:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template.",
                "messages",
                "no_chat_template",
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true.",
                "continue_final_message",
                "invalid_value",
            )
        return _Chat(
            normalize_messages(messages, self.traits),
            plain_json(tools, "tools"),
            self._arguments(template_kwargs or {}),
            add_generation_prompt,
            continue_final_message,
            self.traits,
        )

    def _arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if not name.isidentifier() or name.startswith("_") or name in self._reserved:
                raise InvalidRequest(
                    f"chat_template_kwargs must not set {name!r:.100}.", "chat_template_kwargs", "invalid_value"
                )
        return dict(plain_json(arguments, "chat_template_kwargs"))

    # ------------------------------------------------------------------ rendering
    def _render(self, chat: _Chat) -> str:
        """Raises `InvalidRequest` whatever goes wrong: a template's failure is never the server's."""
        try:
            return self._run(chat)
        except InvalidRequest:
            raise
        except RaisedByTemplate as error:
            raise InvalidRequest(str(error), "messages", "invalid_value") from None
        except Exception as error:
            raise InvalidRequest(
                f"The model's chat template cannot render this conversation: {error}", "messages", "invalid_value"
            ) from None

    def _render_all(self, chat: _Chat) -> str:
        """Instructions that the template would drop are refused: accepted ones must reach the model."""
        text = self._render(chat)
        for message in chat.messages:
            if message["role"] in ("system", "developer") and not _arrived(message["content"], text):
                raise InvalidRequest(
                    f"The model's chat template has no place for this {message['role']} message.",
                    "messages",
                    "invalid_value",
                )
        return text

    def _run(self, chat: _Chat) -> str:
        messages = chat.messages
        if chat.continues:
            final = messages[-1].get("content", "")
            messages = [*messages[:-1], {**messages[-1], "content": final + CONTINUE_HERE}]
        pieces, length = [], 0
        for piece in self._template.generate(
            messages=with_parts(messages) if chat.traits.takes_parts else messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            **{**self._tokenizer.named_tokens, "documents": None, **chat.arguments},
        ):
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise InvalidRequest(
                    f"The conversation is longer than {MAX_RENDERED_CHARS} characters.", "messages", "invalid_value"
                )
            pieces.append(piece)
        text = "".join(pieces)
        return _cut_after(final, text) if chat.continues else text

    # ------------------------------------------------------------------ whose control tokens
    def _holds_control_text(self, chat: _Chat) -> bool:
        find = self._tokenizer.find_control
        return any(next(find(text), None) is not None for text in _strings(_data(chat)))

    def _attribute(self, chat: _Chat, text: str) -> tuple[str, set[int]]:
        """(rendering, numbers of the control tokens in it that come from the conversation)."""
        opening, closing = _unused_marks(chat)
        find = self._tokenizer.find_control

        def mark(words: str) -> str:
            return "".join(_with_marks(words, [m.span() for m in find(words)], opening, closing))

        marked = self._render(_map_strings(chat, mark))
        if any(json.dumps(char)[1:-1] in marked.lower() for char in (opening, closing)):
            raise InvalidRequest(
                "A message holds the text of a control token, which the model's chat template cannot pass on as words.",
                "messages",
            )
        unmarked, typed = _without_marks(marked, opening, closing)
        found = list(find(unmarked))
        words = {number for number, match in enumerate(found) if match.start() in typed}
        # Marks can keep a template from trimming or splitting a message as it should. Where that is all that differs,
        # the rendering without marks is the right one, and its control tokens are the same in the same order.
        same_tokens = [m.group() for m in found] == [m.group() for m in find(text)]
        if same_tokens and "".join(unmarked.split()) == "".join(text.split()):
            return text, words
        return unmarked, words

    # ------------------------------------------------------------------ probes
    def _probe(self, source: str) -> TemplateTraits:
        """Renders small conversations to learn what the template takes."""
        word, name = "octavoprobe", "octavoname"
        user = {"role": "user", "content": word}

        def renders(traits: TemplateTraits, *messages: Message) -> str:
            try:
                return self._run(_Chat(normalize_messages(list(messages), traits), None, {}, False, False, traits))
            except Exception:
                return ""

        def call(traits: TemplateTraits, **content: str) -> str:
            function = {"name": "probe", "arguments": json.dumps({name: word})}
            calls = [{"id": "probe0000", "type": "function", "function": function}]
            return renders(traits, {**user, "content": "?"}, {"role": "assistant", "tool_calls": calls, **content})

        traits = TemplateTraits()
        if word not in renders(traits, user) and word in renders(replace(traits, takes_parts=True), user):
            traits = replace(traits, takes_parts=True)
        knows = replace(traits, takes_developer=True)
        if "developer" in source and word in renders(knows, {**user, "role": "developer"}, {**user, "content": "?"}):
            traits = knows
        absent, empty = call(traits), call(replace(traits, takes_absent_content=False))
        if not absent or absent.count("None") > empty.count("None"):
            traits = replace(traits, takes_absent_content=False)
        as_object = call(traits)
        if word not in as_object or f"{{'{name}'" in as_object:
            as_text = replace(traits, takes_argument_text=True)
            traits = as_text if word in call(as_text) else traits
        return traits


def _arrived(instruction: str, text: str) -> bool:
    """An instruction that is accepted must reach the model; some templates write it as JSON."""
    stripped = instruction.strip()
    return stripped in text or json.dumps(stripped, ensure_ascii=False)[1:-1] in text


def _cut_after(final: str, text: str) -> str:
    """The rendering up to where the last message's content ends."""
    tag = CONTINUE_HERE.strip()
    if final.strip() not in text or tag not in text:
        raise InvalidRequest(
            "The chat template changes the last message, so that it cannot be continued.", "continue_final_message"
        )
    place = text.rindex(tag)
    # Without the tag's own space, the template has trimmed the content: its end, too.
    return text[:place] if text[place:].startswith(CONTINUE_HERE) else text[:place].rstrip()


# ------------------------------------------------------------------ marks
def _data(chat: _Chat) -> list[Any]:
    return [chat.messages, chat.tools, chat.arguments]


def _strings(value: Any) -> Iterator[str]:
    """Every string in JSON data, keys too (a tool call's arguments are the model's or the user's words)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)


def _map_strings(chat: _Chat, change: Callable[[str], str]) -> _Chat:
    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return {change(key): walk(item) for key, item in value.items()}
        return value

    messages, tools, arguments = walk(_data(chat))
    return replace(chat, messages=messages, tools=tools, arguments=arguments)


def _unused_marks(chat: _Chat) -> tuple[str, str]:
    used: set[str] = set()
    for text in _strings(_data(chat)):
        for start in range(0, len(text), PIECE):
            used.update(text[start : start + PIECE])
    free = (chr(code) for code in MARKS if chr(code) not in used)
    opening, closing = next(free, None), next(free, None)
    if opening is None or closing is None:
        raise InvalidRequest("The conversation uses up the private-use characters.", "messages", "invalid_value")
    return opening, closing


def _with_marks(text: str, spans: list[tuple[int, int]], opening: str, closing: str) -> Iterator[str]:
    end = 0
    for start, stop in spans:
        yield from (text[end:start], opening, text[start:stop], closing)
        end = stop
    yield text[end:]


def _without_marks(text: str, opening: str, closing: str) -> tuple[str, set[int]]:
    """(the text without marks, places in it where a marked token begins). A mark that lost its fellow counts too."""
    pieces, length, places, end = [], 0, set(), 0
    for mark in re.finditer(f"[{opening}{closing}]", text):
        pieces.append(text[end : mark.start()])
        length += len(pieces[-1])
        end = mark.end()
        if mark.group() == opening:
            places.add(length)
    return "".join([*pieces, text[end:]]), places
