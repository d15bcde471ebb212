"""The door of the engine: prompts and their parameters become validated `AddRequest`s. Shared by client and LLM."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.messages import AddRequest, EngineReady
from engine.sampling_params import RANDOM_SEED, SamplingParams

_draw = random.SystemRandom()


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What goes along with a prompt and never changes its tokens: who asks, with which rights and how urgently."""

    request_id: str
    """Of several prompts each adds its number to it, of several choices each its own."""
    salt: str | None = None
    adapter: str | None = None
    tenant: str | None = None
    priority: int = 0
    deadline: float | None = None
    """time.monotonic() after which the request fails if all of it still waits."""


def admit_all(
    prompts: list[list[int]], params: SamplingParams, envelope: Envelope, ready: EngineReady
) -> list[list[AddRequest]]:
    """What `admit` makes of each prompt of one request. Raises what it raises, for the first prompt that is refused;
    of several, the error has its number."""
    if len(prompts) == 1:
        return [admit(prompts[0], params, envelope, ready)]
    admitted = []
    for number, prompt in enumerate(prompts):
        own = msgspec.structs.replace(envelope, request_id=f"{envelope.request_id}.{number}")
        with about_prompt(number):
            admitted.append(admit(prompt, params, own, ready, batch=envelope.request_id))
    return admitted


@contextmanager
def about_prompt(number: int) -> Iterator[None]:
    """Refusals in here are about this one of several prompts."""
    try:
        yield
    except InvalidRequest as error:
        error.prompt = number
        raise


def admit(
    prompt_token_ids: list[int],
    params: SamplingParams,
    envelope: Envelope,
    ready: EngineReady,
    batch: str | None = None,
) -> list[AddRequest]:
    """One `AddRequest` for each of the n choices, max_tokens clamped to the window and the seed drawn. `batch`: what it
    is a part of, if of something larger.

    Raises `InvalidRequest` (empty prompt, token id outside the vocabulary) or `ContextLengthExceeded`; where they are
    about the prompt, `param` is None: the caller knows which field it came from.
    """
    window = ready.cache.max_model_len
    if not prompt_token_ids:
        raise InvalidRequest("The prompt is empty: it must have at least one token.", code="invalid_value")
    if len(prompt_token_ids) + (params.max_tokens != 0) > window:
        raise ContextLengthExceeded(window, len(prompt_token_ids))
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= ready.vocab_size:
        bad = next(token for token in prompt_token_ids if not 0 <= token < ready.vocab_size)
        raise InvalidRequest(
            f"The prompt holds token id {bad}; ids of this model are 0 to {ready.vocab_size - 1}.",
            code="invalid_value",
        )
    params.check_vocabulary(ready.vocab_size)
    room = window - len(prompt_token_ids)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    params = msgspec.structs.replace(
        params,
        max_tokens=limit,
        min_tokens=min(params.min_tokens, limit),
        seed=_draw.getrandbits(63) if params.seed in (None, RANDOM_SEED) else params.seed,
    )
    arrival = time.monotonic()
    return [
        AddRequest(
            request_id=envelope.request_id if params.n == 1 else f"{envelope.request_id}-{index}",
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            arrival=arrival,
            group=envelope.request_id if params.n > 1 else None,
            batch=batch or (envelope.request_id if params.n > 1 else None),
            index=index,
            salt=envelope.salt,
            adapter=envelope.adapter,
            tenant=envelope.tenant,
            priority=envelope.priority,
            deadline=envelope.deadline,
        )
        for index in range(params.n)
    ]
