"""One sequence's tokens to what its reader gets: text, stop strings, published tokens.

The API process decides here where a text ends: what the engine computes beyond a stop string is never published.
"""

from collections.abc import Sequence

from engine.messages import FinishReason, TextDelta, Timings, TokenLogprobs, TokenOutput
from engine.sampling_params import SamplingParams
from engine.text.stop_strings import StopMatcher, StopStrings
from engine.text.tokenizer import Tokenizer


class OutputProcessor:
    """Takes a sequence's `TokenOutput`s in order.

    A delta is made when there is text or an end. Tokens whose text is held back (parts of characters, possible stop
    strings) come with the next delta, their log-probabilities beside them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        index: int = 0,
        prompt_token_ids: Sequence[int] = (),
        stops: StopStrings | None = None,
    ) -> None:
        """`prompt_token_ids`: what the text continues (SentencePiece drops a space at a text's very start).
        `stops`: made once from `params.stop` where many choices share them."""
        self.index = index
        self.num_tokens = 0
        """Published tokens, delivered or about to be."""
        self.finish_reason: FinishReason | None = None
        self.must_abort = False
        """A stop string ended the text while the engine still works on the sequence."""
        self._params = params
        self._text = tokenizer.stream(params.skip_special_tokens, prompt_token_ids)
        self._stops = StopMatcher(stops or StopStrings(params.stop), params.include_stop_str_in_output)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] | None = [] if params.prompt_logprobs is not None else None
        self._timings: Timings | None = None
        self._cached_tokens = 0
        self._num_preemptions = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: TokenOutput) -> TextDelta | None:
        """The next delta, or None where there is nothing to show yet. Outputs after the end are ignored."""
        if self.finished:
            return None
        self._timings = output.timings or self._timings
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        self._num_preemptions = max(self._num_preemptions, output.num_preemptions)
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += output.prompt_logprobs or ()
        text, stop = "", None
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            self._publish(output, position)
            if position == last and output.finish_reason == "stop" and self._hides_stop_token:
                continue
            more, stop = self._stops.push(self._text.push(token_id), self._armed)
            text += more
            if stop is not None:
                break
        if output.finish_reason is not None and stop is None:
            more, stop = self._stops.push(self._text.flush(), self._armed)
            text += more if stop is not None else more + self._stops.flush()
        if stop is not None:
            self.finish_reason, self.must_abort = "stop", output.finish_reason is None
            return self._delta(text, stop, None)
        self.finish_reason = output.finish_reason
        return self._delta(text, output.stop_reason, output.error) if text or self.finished else None

    @property
    def _hides_stop_token(self) -> bool:
        return self._params.skip_special_tokens and not self._params.include_stop_str_in_output

    @property
    def _armed(self) -> bool:
        """min_tokens keeps stop strings from counting, too."""
        return self.num_tokens > self._params.min_tokens

    def _publish(self, output: TokenOutput, position: int) -> None:
        self.num_tokens += 1
        self._token_ids.append(output.token_ids[position])
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs[position])

    def _delta(self, text: str, stop_reason: int | str | None, error: str | None) -> TextDelta:
        delta = TextDelta(
            index=self.index,
            text=text,
            token_ids=self._token_ids,
            logprobs=self._logprobs if self._params.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            error=error,
            cached_tokens=self._cached_tokens,
            timings=self._timings,
            num_preemptions=self._num_preemptions,
        )
        self._token_ids, self._logprobs, self._prompt_logprobs, self._timings = [], [], None, None
        return delta
