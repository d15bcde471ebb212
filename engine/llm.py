"""Octavo without HTTP: the same core, driven from one thread."""

import gc
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self

from configs.settings import Settings
from engine.admission import Envelope, admit
from engine.build import build_core
from engine.core.loop import EngineCore
from engine.device import free_unused
from engine.errors import RequestFailed
from engine.messages import FinishReason, TextDelta, TokenLogprobs, TokenOutput
from engine.sampling_params import SamplingParams
from engine.served_model import ServedModel
from engine.source import resolve
from engine.text.output_processor import OutputProcessor

Prompt = str | list[int]
PROMPTS = "prompts must be texts and lists of token ids, or one list of ids"


@dataclass
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """All choices of one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    """Prompt tokens that the first choice found in the cache."""
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on, where they were asked for."""


class LLM:
    """A model in this process.

        with LLM("HuggingFaceTB/SmolLM2-135M-Instruct", dtype="float32") as llm:
            params = SamplingParams(temperature=0, max_tokens=8)
            print(llm.generate("The capital of France is", params)[0].outputs[0].text)

    `settings` are the server's flags with underscores (see `octavo serve --help`). Raises `StartupError`. Without
    `with`, `shutdown` frees the memory; so does the last reference's end, but of a GPU's for this process only.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Any) -> None:
        resolved = Settings.create({"model": model, **settings})
        source = resolve(resolved)
        served = ServedModel.load(source, resolved)
        self.tokenizer, self.chat_renderer = served.tokenizer, served.chat
        self._built: EngineCore | None
        self._built, self.info = build_core(served.launch(source, resolved), lambda loading: None)
        self._next_id = 0
        self._busy = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completes each prompt (text, or token ids), all together; results in the order of the prompts.

        One call at a time: a second thread gets a `RuntimeError` until the first is answered. Raises `InvalidRequest`
        or `TypeError` before anything runs, `RequestFailed` where a sequence fails. Anything else, Ctrl-C too, ends
        the engine in the middle of a step: it is shut down then.
        """
        batch = _as_batch(prompts)
        if isinstance(params, Sequence):
            given, copies = list(params), 1
        else:
            given, copies = [SamplingParams() if params is None else params], len(batch)
        if not all(isinstance(one, SamplingParams) for one in given):
            raise TypeError("params must be SamplingParams, one or as many as there are prompts")
        each = given * copies
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts need as many sampling params, or one; got {len(each)}")
        return self._run([self._encode(prompt) for prompt in batch], each)

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> RequestOutput:
        """Answers one conversation. Raises as `generate` does."""
        if not isinstance(params, SamplingParams | None):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        chosen = SamplingParams(max_tokens=None) if params is None else params
        return self._run([(None, self.chat_renderer.render(messages))], [chosen])[0]

    def memory_stats(self) -> dict[str, int | float]:
        """total_pages, used_pages, cached_pages, free_pages, utilization, slot_utilization, active_requests,
        bytes_per_page, bytes_per_token, total_bytes."""
        return self._core.memory_stats()

    def events(self, limit: int = 200) -> list[dict[str, Any]]:
        """The KV manager's latest `limit` events with their reasons, newest last."""
        if not _is_id(limit) or limit < 0:
            raise ValueError(f"limit must be a number of events, got {limit!r}")
        return self._core.events(limit, None)

    def shutdown(self) -> None:
        """Frees the model and the pool, a GPU's memory for everybody: nothing can be generated afterwards. Safe to call
        twice."""
        if self._built is not None:
            self._built.shutdown()
            self._built = None
            gc.collect()
            free_unused()

    @property
    def _core(self) -> EngineCore:
        if self._built is None:
            raise RuntimeError("this LLM has been shut down")
        return self._built

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        return None, prompt

    def _run(self, prompts: list[tuple[str | None, list[int]]], params: list[SamplingParams]) -> list[RequestOutput]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this LLM is answering another thread: give it all prompts in one call")
        try:
            return self._complete(prompts, params)
        finally:
            self._busy.release()

    def _complete(
        self, prompts: list[tuple[str | None, list[int]]], params: list[SamplingParams]
    ) -> list[RequestOutput]:
        core = self._core
        results: list[RequestOutput] = []
        waiting: dict[str, tuple[OutputProcessor, RequestOutput]] = {}
        requests = []
        for (text, ids), each in zip(prompts, params, strict=True):
            self._next_id += 1
            result = RequestOutput(text, ids, [CompletionOutput(index) for index in range(each.n)])
            results.append(result)
            for request in admit(ids, each, Envelope(request_id=f"offline-{self._next_id}"), self.info):
                requests.append(request)
                processor = OutputProcessor(self.tokenizer, request.params, index=request.index, prompt_token_ids=ids)
                waiting[request.request_id] = (processor, result)
        try:
            for request in requests:
                core.add(request)
            while waiting:
                for output in core.step():
                    self._take(output, waiting)
        except RequestFailed:
            raise
        except BaseException:  # Ctrl-C too: a step that was cut short leaves the engine's parts at odds
            self.shutdown()
            raise
        finally:
            if self._built is not None:
                core.abort(list(waiting), "abort")
        return results

    def _take(self, output: TokenOutput, waiting: dict[str, tuple[OutputProcessor, RequestOutput]]) -> None:
        if output.request_id not in waiting:
            return
        if output.finish_reason == "error":
            raise RequestFailed(output.error or "the request failed")
        processor, result = waiting[output.request_id]
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = [*(result.prompt_logprobs or ()), *output.prompt_logprobs]
        result.num_preemptions = max(result.num_preemptions, output.num_preemptions)
        delta = processor.push(output)
        if delta is not None:
            if delta.index == 0:
                result.cached_tokens = max(result.cached_tokens, delta.cached_tokens)
            _append(result.outputs[delta.index], delta)
        if processor.finished:
            del waiting[output.request_id]
            if processor.must_abort:
                self._core.abort([output.request_id], "stop")


def _as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt may be given bare: a text, or a list of token ids. Raises `TypeError` for what is neither."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"{PROMPTS}; got {type(prompts).__name__}")
    batch: list[Any] = list(prompts)
    are_ids = [_is_id(item) for item in batch]
    if any(are_ids):
        if not all(are_ids):
            raise TypeError(f"{PROMPTS}; got token ids among them")
        return [list(map(int, batch))]
    return [prompt if isinstance(prompt, str) else _ids(prompt) for prompt in batch]


def _ids(prompt: Any) -> list[int]:
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise TypeError(f"{PROMPTS}; got {type(prompt).__name__} among them")
    items = list(prompt)
    if not all(map(_is_id, items)):
        wrong = next(item for item in items if not _is_id(item))
        raise TypeError(f"{PROMPTS}; got {type(wrong).__name__} among token ids")
    return list(map(int, items))


def _is_id(item: object) -> bool:
    """numpy's integers are some too."""
    return isinstance(item, Integral) and not isinstance(item, bool)


def _append(choice: CompletionOutput, delta: TextDelta) -> None:
    choice.text += delta.text
    choice.token_ids.extend(delta.token_ids)
    if delta.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]
    choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
