"""From a row's tokens to what its sequence publishes: where it ends, and why."""

from copy import copy

from engine.messages import FinishReason, PromptScores, RowResult, TokenOutput
from engine.request import Request


def take_row(request: Request, row: RowResult | None, scores: PromptScores | None, now: float) -> TokenOutput:
    """What a step brought: tokens, log-probabilities of the prompt, or the end of a prompt that generates nothing.

    A sequence ends with a stop token behind its first `min_tokens` tokens (the token is published; the text layer hides
    it), or with 'length' at `max_total` tokens.
    """
    output = TokenOutput(request.request_id, [], num_preemptions=request.num_preemptions)
    if scores is not None:
        fresh = scores.logprobs[request.num_scored + 1 - scores.first :]  # before a preemption some may have come
        request.num_scored += len(fresh)
        output.prompt_logprobs = fresh
    first = row is not None and len(request.token_ids) == request.num_prompt
    reason: FinishReason | None = None
    if row is not None:
        reason = _take_tokens(request, row, output)
    elif request.max_total == request.num_prompt <= request.num_confirmed:
        reason = "length"
    if first:
        request.timings.first_token = now
    if first or reason is not None:
        output.cached_tokens, output.timings = request.cached_tokens, copy(request.timings)
    if reason is not None:
        request.timings.finished = now
        output.finish_reason, output.stop_reason, output.timings = reason, request.stop_reason, copy(request.timings)
    return output


def _take_tokens(request: Request, row: RowResult, output: TokenOutput) -> FinishReason | None:
    """Appends the row's tokens as far as the sequence goes."""
    token_ids, new = request.token_ids, row.token_ids
    assert new, f"a row of {request.request_id} brought neither a token nor an error"
    reason: FinishReason | None = None
    taken = 0
    for token in new:
        token_ids.append(token)
        taken += 1
        if token in request.stop_ids and len(token_ids) > request.num_prompt + request.params.min_tokens:
            reason = "stop"
            if token in request.params.stop_token_ids:
                request.stop_reason = token
            break
        if len(token_ids) >= request.halts_at:  # what the row may have beyond a refresh was drawn from the old pages
            reason = "length" if len(token_ids) >= request.max_total else None
            break
    output.token_ids = new if taken == len(new) else new[:taken]
    if row.logprobs is not None:
        output.logprobs = row.logprobs[:taken]
    return reason


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
