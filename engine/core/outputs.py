"""From a row's tokens to what its sequence publishes: where it ends, and why."""

from copy import copy

from engine.messages import FinishReason, RowResult, TokenOutput
from engine.request import Request


def take_tokens(request: Request, row: RowResult, now: float) -> TokenOutput:
    """Appends the row's tokens as far as the sequence goes.

    It ends with a stop token behind its first `min_tokens` tokens (the token is published; the text layer hides it), or
    with 'length' at `max_total` tokens.
    """
    token_ids, new = request.token_ids, row.token_ids
    assert new, f"a row of {request.request_id} brought neither a token nor an error"
    first = len(token_ids) == request.num_prompt
    earliest_stop = request.num_prompt + request.params.min_tokens
    reason: FinishReason | None = None
    taken = 0
    for token in new:
        token_ids.append(token)
        taken += 1
        if token in request.stop_ids and len(token_ids) > earliest_stop:
            reason = "stop"
            if token in request.params.stop_token_ids:
                request.stop_reason = token
            break
        if len(token_ids) >= request.max_total:
            reason = "length"
            break
    logprobs = row.logprobs
    if taken < len(new):
        new, logprobs = new[:taken], logprobs and logprobs[:taken]
    output = TokenOutput(request.request_id, new, logprobs, num_preemptions=request.num_preemptions)
    if first:
        request.timings.first_token = now
        output.cached_tokens = request.cached_tokens
        output.timings = copy(request.timings)
    if reason is not None:
        request.timings.finished = now
        output.finish_reason, output.stop_reason, output.timings = reason, request.stop_reason, copy(request.timings)
    return output


def failure(request: Request, message: str, now: float) -> TokenOutput:
    """The last output of a sequence that failed; `message` is for its client."""
    request.error = message
    request.timings.finished = now
    return TokenOutput(
        request.request_id,
        [],
        finish_reason="error",
        error=message,
        num_preemptions=request.num_preemptions,
        timings=copy(request.timings),
    )
