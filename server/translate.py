"""The only way from OpenAI's words to ours: a checked body becomes `Work` for the engine and an `Answer` for the
client."""

import math
import re
import time
import uuid
from collections.abc import Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request

from engine import (
    MAX_STOP_STRING_CHARS,
    ContextLengthExceeded,
    EngineClient,
    Envelope,
    InvalidRequest,
    SamplingParams,
    about_prompt,
)
from server.context import ServerContext, caller_of
from server.errors import about
from server.generation import Work
from server.protocol.answer import Answer, AnswerInfo
from server.protocol.body import num_values
from server.protocol.chat import MAX_CONTENT_PARTS, MAX_TEMPLATE_VALUES, ChatBody, TemplateBody
from server.protocol.chat_answer import ChatAnswer
from server.protocol.completion import CompletionBody
from server.protocol.completion_answer import CompletionAnswer
from server.protocol.logprobs import ShownLogprobs, TokenSpelling
from server.protocol.sampling import GenerationBody
from server.protocol.unsupported import CHAT, COMPLETION, refuse
from server.request_id import is_request_id

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for raw completions. A chat without a limit runs to the window."""
MAX_CHOICES = 1024
"""Prompts times n of one request."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = MAX_STOP_STRING_CHARS
MAX_LOGPROBS = 1 << 19
"""In an answer in one piece, alternatives included: about 100 MB of JSON."""
_TOKEN_ID = re.compile(r"-?[0-9]{1,10}", re.ASCII)
TIER_PRIORITY = {"priority": -1, "fast": -1, "flex": 1}


async def chat(context: ServerContext, client: EngineClient, body: ChatBody, request: Request) -> tuple[Work, Answer]:
    """Raises `InvalidRequest`, or `HTTPError` for an unknown model."""
    model = context.served_name(body.model)
    refuse(body, CHAT)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs", "invalid_value")
    top = (body.top_logprobs or 0) if body.logprobs else None
    limit, name = body.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, name = body.max_tokens, "max_tokens"
    params = await _params(context, client, body, limit, name, ShownLogprobs(top, body.prompt_logprobs))
    must_fit = body.truncate_prompt_tokens is None
    ids = await conversation(context, client, body, must_fit)
    prompts = [truncated(client, ids, body, params)]
    params = with_room_for_logprobs(client, body, params, limit, prompts)
    work = Work(prompts, params, envelope_of(context, body, request))
    info = answer_info(context, body, f"chatcmpl-{request_id_of(body, request)}", model, work.prompts)
    spelling = TokenSpelling(client.tokenizer, params.skip_special_tokens)
    return work, ChatAnswer(info, spelling, ShownLogprobs(top, body.prompt_logprobs))


async def completion(
    context: ServerContext, client: EngineClient, body: CompletionBody, request: Request
) -> tuple[Work, Answer]:
    """Raises `InvalidRequest`, or `HTTPError` for an unknown model."""
    model = context.served_name(body.model)
    refuse(body, COMPLETION)
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of other than n = {body.n or 1} is not supported, got {body.best_of}."
        raise InvalidRequest(message, "best_of", "unsupported_parameter")
    limit = max(COMPLETION_MAX_TOKENS, body.min_tokens or 0) if body.max_tokens is None else body.max_tokens
    echo = bool(body.echo)
    scored = [top for top in (body.prompt_logprobs, body.logprobs if echo else None) if top is not None]
    if echo and limit == 0 and not scored:
        scored = [0]  # nothing is to be computed, yet the answer has to say so
    wanted = ShownLogprobs(body.logprobs, max(scored, default=None))
    params = await _params(context, client, body, limit, "max_tokens", wanted)
    prompts = [truncated(client, ids, body, params) for ids in await encoded_prompts(context, client, body)]
    if len(prompts) * params.n > MAX_CHOICES:
        message = f"{len(prompts)} prompts times n = {params.n} are more than {MAX_CHOICES} choices."
        raise InvalidRequest(message, "n", "invalid_value")
    params = with_room_for_logprobs(client, body, params, limit, prompts)
    work = Work(prompts, params, envelope_of(context, body, request))
    info = answer_info(context, body, f"cmpl-{request_id_of(body, request)}", model, prompts)
    spelling = TokenSpelling(client.tokenizer, params.skip_special_tokens)
    shown = ShownLogprobs(body.logprobs, body.prompt_logprobs)
    return work, CompletionAnswer(info, spelling, shown, params.n, echo)


# ---------------------------------------------------------------------- sampling
async def _params(
    context: ServerContext,
    client: EngineClient,
    body: GenerationBody,
    limit: int | None,
    limit_name: str,
    wanted: ShownLogprobs,
) -> SamplingParams:
    """`sampling_params`, off the event loop where there is much to tokenise."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs are not sent in streams.", "prompt_logprobs", "invalid_value")
    size = sum(map(len, body.bad_words or ()))
    return await context.aside.run(size, lambda: sampling_params(client, body, limit, limit_name, wanted))


def sampling_params(
    client: EngineClient, body: GenerationBody, limit: int | None, limit_name: str, wanted: ShownLogprobs
) -> SamplingParams:
    """What the request says, else what the model's authors chose, else neutral values. Raises `InvalidRequest`."""
    defaults = client.model.generation_defaults
    least = 1 if wanted.prompt is None else 0
    if limit is not None and limit < least:
        raise InvalidRequest(f"{limit_name} must be at least {least}, got {limit}.", limit_name, "invalid_value")
    if limit is None and "max_tokens" in defaults:
        limit = int(defaults["max_tokens"])
    given: dict[str, Any] = {
        "n": body.n,
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "seed": body.seed,
        "stop": (body.stop,) if isinstance(body.stop, str) else body.stop and tuple(body.stop),
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "stop_token_ids": body.stop_token_ids and tuple(body.stop_token_ids),
        "allowed_token_ids": None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids)),
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "logit_bias": _token_biases(body.logit_bias),
        "bad_words": body.bad_words and _bad_words(client, body.bad_words),
    }
    chosen: dict[str, Any] = {name: defaults.get(name) if value is None else value for name, value in given.items()}
    explicit: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    params = SamplingParams(max_tokens=limit, logprobs=wanted.output, prompt_logprobs=wanted.prompt, **explicit)
    _refuse_nothing_allowed(client, params)
    return params


def with_room_for_logprobs(
    client: EngineClient, body: GenerationBody, params: SamplingParams, limit: int | None, prompts: list[list[int]]
) -> SamplingParams:
    """An answer in one piece holds a bounded number of log-probabilities. Raises `InvalidRequest` where the request
    asks for more; where it says nothing of its length (`limit` is None), the answer ends where that room does."""
    window = window_of(client)
    if body.stream or window is None or params.logprobs is params.prompt_logprobs is None:
        return params
    room = MAX_LOGPROBS
    if params.prompt_logprobs is not None:
        room -= params.n * (1 + params.prompt_logprobs) * sum(map(len, prompts))
    each = 0 if params.logprobs is None else params.n * (1 + params.logprobs)  # for a token of each choice of a prompt

    def total(tokens: int) -> int:
        return each * sum(min(tokens, max(window - len(prompt), 0)) for prompt in prompts)

    asked = params.min_tokens if limit is None else limit
    if total(asked) > room:
        name = "logprobs" if room == MAX_LOGPROBS else "prompt_logprobs"
        message = (
            f"{name}: {len(prompts) * params.n} choices of {asked} tokens and their prompts make "
            f"{total(asked) + MAX_LOGPROBS - room} log-probabilities; an answer that is not streamed has room for "
            f"{MAX_LOGPROBS}."
        )
        raise InvalidRequest(message, name, "invalid_value")
    if limit is not None or total(params.max_tokens or window) <= room:
        return params
    return replace(params, max_tokens=room // (each * len(prompts)))


def _refuse_nothing_allowed(client: EngineClient, params: SamplingParams) -> None:
    """Until `min_tokens` exist, tokens that end the text are masked: one of the allowed ones must be another."""
    if params.allowed_token_ids is None or params.min_tokens == 0:
        return
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else client.tokenizer.eos_token_ids)}
    if ends.issuperset(params.allowed_token_ids):
        message = "allowed_token_ids holds only tokens that end the text, and min_tokens forbids those at first."
        raise InvalidRequest(message, "allowed_token_ids", "invalid_value")


def _token_biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    result: dict[int, float] = {}
    for key, value in biases.items():
        if not _TOKEN_ID.fullmatch(key):
            message = f"logit_bias maps token ids, got the key {key[:40]!r}."
            raise InvalidRequest(message, "logit_bias", "invalid_value")
        if int(key) in result:
            raise InvalidRequest(f"logit_bias has two keys for token {int(key)}.", "logit_bias", "invalid_value")
        result[int(key)] = value
    return result


def _bad_words(client: EngineClient, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and, where only its first token differs then, after a space."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words may have at most {MAX_BAD_WORDS} entries, got {len(words)}.", "bad_words", "invalid_value"
        )
    longest = max(map(len, words))
    if longest > MAX_BAD_WORD_CHARS:
        message = f"bad_words may have at most {MAX_BAD_WORD_CHARS} characters each, got {longest}."
        raise InvalidRequest(message, "bad_words", "invalid_value")
    sequences: list[tuple[int, ...]] = []
    with about("bad_words"):
        for word in words:
            plain = tuple(client.tokenizer.encode_plain(word))
            spaced = tuple(client.tokenizer.encode_plain(" " + word.lstrip()))
            sequences.append(plain)
            if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
                sequences.append(spaced)
    return tuple(sequences)


# ---------------------------------------------------------------------- prompts
async def encoded_prompts(context: ServerContext, client: EngineClient, body: CompletionBody) -> list[list[int]]:
    """Token ids of each prompt. In raw text, control tokens are parsed."""
    prompt = body.prompt
    must_fit = body.truncate_prompt_tokens is None
    if isinstance(prompt, str):
        return await encoded(context, client, [prompt], body.add_special_tokens, must_fit)
    texts = [text for text in prompt if isinstance(text, str)]
    if texts:
        return await encoded(context, client, texts, body.add_special_tokens, must_fit)
    lists = [ids for ids in prompt if isinstance(ids, list)]
    lists = lists or [[token for token in prompt if isinstance(token, int)]]
    window = window_of(client)
    for number, ids in enumerate(lists):
        if must_fit and window is not None and len(ids) > window:  # before anything goes through the ids
            with _about_one(number, lists):
                raise ContextLengthExceeded(window, len(ids))
    return lists


async def encoded(
    context: ServerContext, client: EngineClient, texts: list[str], add_special_tokens: bool | None, must_fit: bool
) -> list[list[int]]:
    """Special tokens are added unless the request says no. Raises `InvalidRequest` for a text that is longer than any
    that is tokenised, with `must_fit` `ContextLengthExceeded` for one that the window cannot hold."""
    special, size = add_special_tokens is not False, sum(map(len, texts))
    tokenizer, window = client.tokenizer, window_of(client)

    def encode() -> list[list[int]]:
        tokens = []
        for number, text in enumerate(texts):
            with _about_one(number, texts):
                tokens.append(tokenizer.encode(text, add_special_tokens=special))
        return tokens

    for number, text in enumerate(texts):
        with _about_one(number, texts):
            if must_fit:
                tokenizer.check_fits(text, window)
            tokenizer.check_length(text, window)
    return await context.aside.run(size, encode)


def _about_one(number: int, prompts: Sized) -> AbstractContextManager[None]:
    return about_prompt(number) if len(prompts) > 1 else nullcontext()


async def conversation(
    context: ServerContext,
    client: EngineClient,
    body: TemplateBody,
    must_fit: bool = False,
) -> list[int]:
    """Token ids of the rendered conversation: messages, template arguments and all. Only the template's own text
    becomes control tokens. `must_fit` as in `encoded`."""
    messages = body.messages or []
    num_parts = sum(message.num_parts for message in messages)
    if num_parts > MAX_CONTENT_PARTS:
        message = f"All messages together may have at most {MAX_CONTENT_PARTS} content parts, got {num_parts}."
        raise InvalidRequest(message, "messages", "invalid_value")
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    window = window_of(client)

    def render() -> list[int]:
        if num_values(messages, body.chat_template_kwargs, limit=MAX_TEMPLATE_VALUES) > MAX_TEMPLATE_VALUES:
            message = f"messages and chat_template_kwargs may have at most {MAX_TEMPLATE_VALUES} values in all."
            raise InvalidRequest(message, "messages", "invalid_value")
        return client.chat.render(
            [message.model_dump(exclude_none=True) for message in messages],
            add_generation_prompt=generates,
            continue_final_message=continues,
            template_kwargs=extra,
            window=window,
            must_fit=must_fit,
        )

    return await context.aside.run(body.num_bytes, render)


async def decoded(context: ServerContext, client: EngineClient, tokens: list[int]) -> str:
    """Raises `InvalidRequest` for an id outside the vocabulary."""
    size = client.tokenizer.vocab_size

    def decode() -> str:
        for token in tokens:
            if not 0 <= token < size:
                raise InvalidRequest(f"tokens holds {token}; ids are 0 to {size - 1}.", "tokens", "invalid_value")
        return client.tokenizer.decode(tokens, skip_special_tokens=False)

    return await context.aside.run(len(tokens), decode)


async def token_texts(context: ServerContext, client: EngineClient, tokens: list[int]) -> list[str]:
    """Each token on its own."""
    return await context.aside.run(len(tokens), lambda: [client.tokenizer.token_text(token) for token in tokens])


def window_of(client: EngineClient) -> int | None:
    """None while the engine is loading."""
    return None if client.info is None else client.info.cache.max_model_len


def truncated(client: EngineClient, ids: list[int], body: GenerationBody, params: SamplingParams) -> list[int]:
    """The prompt's end, if the request asks for that by `truncate_prompt_tokens`; input is never dropped otherwise."""
    keep = body.truncate_prompt_tokens
    if keep is None or client.info is None:
        return ids
    if keep == 0:
        message = "truncate_prompt_tokens must be -1 or at least 1, got 0."
        raise InvalidRequest(message, "truncate_prompt_tokens", "invalid_value")
    if keep < 0:
        keep = max(1, client.info.cache.max_model_len - (params.max_tokens or 1))
    return ids[-keep:]


# ---------------------------------------------------------------------- who asks
def envelope_of(context: ServerContext, body: GenerationBody, request: Request) -> Envelope:
    tenant = caller_of(request).tenant
    if body.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty.", "cache_salt", "invalid_value")
    if body.priority and context.settings.scheduling_policy != "priority":
        message = f"priority {body.priority} needs a server started with --scheduling-policy priority."
        raise InvalidRequest(message, "priority", "unsupported_parameter")
    priority = body.priority if body.priority is not None else TIER_PRIORITY.get(body.service_tier or "", 0)
    request.state.engine_id = f"{request_id_of(body, request)}~{uuid.uuid4().hex[:8]}"  # for the log
    return Envelope(
        request_id=request.state.engine_id,
        salt=cache_salt(tenant if context.settings.cache_sharing == "key" else None, body.cache_salt),
        tenant=tenant,
        priority=priority,
        deadline=_deadline(context, body, request),
    )


def request_id_of(body: GenerationBody, request: Request) -> str:
    """One for the answer's id, `x-request-id`, the log, the KV cache's events and whoever aborts it: that header's as
    it came, else the body's, else a fresh one."""
    if body.request_id is not None and not is_request_id(request.headers.get("x-request-id")):
        request.state.request_id = body.request_id
    chosen: str = request.state.request_id
    return chosen


def cache_salt(tenant: str | None, salt: str | None) -> str | None:
    """Roots the prefix tree. Tagged by kind, the digest first and of fixed length: no salt passes for another's key."""
    parts = []
    if tenant is not None:
        parts.append(f"key={tenant}")
    if salt is not None:
        parts.append(f"salt={salt}")
    return ";".join(parts) or None


def _deadline(context: ServerContext, body: GenerationBody, request: Request) -> float | None:
    """When the client will have given up, as OpenAI's clients say; comment lines keep a stream's client waiting."""
    try:
        seconds = float(request.headers.get("x-stainless-read-timeout", "nan"))
    except ValueError:
        return None
    if not (math.isfinite(seconds) and seconds > 0):
        return None
    if body.stream and 0 < context.settings.sse_keep_alive_interval < seconds:
        return None
    return time.monotonic() + seconds


def answer_info(
    context: ServerContext, body: GenerationBody, answer_id: str, model: str, prompts: list[list[int]]
) -> AnswerInfo:
    return AnswerInfo(
        id=answer_id,
        model=model,
        created=int(time.time()),
        fingerprint=context.fingerprint,
        service_tier=body.service_tier,
        include_usage=body.wants_usage,
        running_usage=body.wants_running_usage,
        return_token_ids=bool(body.return_token_ids),
        prompt_token_ids=prompts,
    )
