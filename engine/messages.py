"""What crosses a boundary: API process <-> engine process, scheduler <-> executor.

    AddRequest ─> scheduler ─> StepPlan ─> executor ─> StepResult ─> scheduler ─> TokenOutput ─> TextDelta ─> SSE

Slots are positions in [0, max_num_seqs): the scheduler hands them out, the runner keeps one row of state (tokens, block
table, sampling parameters) in each.
"""

from collections.abc import Collection
from typing import Any, Literal

import msgspec

from engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


# ------------------------------------------------------------------ API process -> engine process
class AddRequest(msgspec.Struct, kw_only=True, tag=True):
    """One sequence to complete. `n` choices are n of these with one `group`; index 0 leads."""

    request_id: str
    """Unique among open sequences; choices of one HTTP request are 'ID-0', 'ID-1', …"""
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    """time.monotonic() in the API process (one clock for all processes of a machine)."""
    group: str | None = None
    index: int = 0
    """The choice's index: part of the generator's key."""
    batch: str | None = None
    """Common to all sequences of one HTTP request, where there are several."""
    salt: str | None = None
    """Roots the prefix tree: sequences with different salts share nothing."""
    adapter: str | None = None
    tenant: str | None = None
    priority: int = 0
    """Lower runs first."""
    deadline: float | None = None
    """time.monotonic() after which nobody waits any more: a sequence still queued then fails with finish 'error',
    unless one of its batch has been scheduled."""


class AbortRequests(msgspec.Struct, tag=True):
    """Ends sequences whose reader is gone or has seen enough (a stop string). No TokenOutput follows."""

    request_ids: list[str]
    reason: Literal["abort", "stop"] = "abort"
    """'abort': nobody reads any more; 'stop': finished by a stop string in the API process."""


class Shutdown(msgspec.Struct, tag=True):
    """The engine ends at once."""


class KVReportQuery(msgspec.Struct, tag=True):
    """Asks for `KVReport` (GET /debug/kv)."""

    query_id: int
    num_events: int = 200
    tenant: str | None = None


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Asks for an empty cache and for `PrefixCacheReset`."""

    query_id: int


class Launch(msgspec.Struct):
    """What a new engine process is told, on its standard input."""

    path: str
    """Folder or .gguf file of the model, already on this machine."""
    name: str
    settings: dict[str, Any]
    """`Settings`, as JSON values."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence, as the tokenizer's files and the generation configuration name them."""
    tried_token_ids: list[int] = []
    """A text in the model's own tokens, to try the KV cache's format with; none: it is not tried."""
    fit_token_ids: list[int] = []
    """What follows in it, to fit keys to; none: they are not fitted."""


ToEngine = AddRequest | AbortRequests | Shutdown | KVReportQuery | ResetPrefixCache


# ------------------------------------------------------------------ engine process -> API process
class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position, of the model's own distribution (before temperature and masks)."""

    logprob: float
    """Of the token that stands there; -9999 stands for minus infinity."""
    rank: int
    """1: the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


class Timings(msgspec.Struct, array_like=True):
    """time.monotonic() marks of one sequence, 0.0 where not reached."""

    arrival: float
    first_scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class TokenOutput(msgspec.Struct, omit_defaults=True):
    """What one step brought one sequence."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token's id, for a stop by `stop_token_ids`; None for end-of-sequence."""
    error: str | None = None
    """With finish_reason 'error': what happened, in words for the client."""
    cached_tokens: int = 0
    """Prompt tokens taken from the cache when the sequence was first scheduled; on the first output of a sequence."""
    num_preemptions: int = 0
    timings: Timings | None = None
    """On the first and on the last output of a sequence."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's second and later tokens: those that this step has computed, in order. Asked for only."""


class Stats(msgspec.Struct, array_like=True):
    """One snapshot a step, from the source of truth. `*_total` only ever grow."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of waiting sequences that are still to be computed."""
    pages_total: int = 0
    pages_free: int = 0
    """Neither in use nor cached."""
    pages_active: int = 0
    """In at least one block table."""
    pages_cached: int = 0
    """In no block table, kept for reuse, evictable."""
    pages_shared: int = 0
    """In two or more block tables."""
    tokens_stored: int = 0
    """Token slots filled in active pages."""
    received_total: int = 0
    """AddRequest messages taken from the API process; it knows how many it sent and so how many are on their way."""
    steps_total: int = 0
    scheduled_tokens: int = 0
    """Tokens in the last step."""
    prefix_queries_total: int = 0
    """Prompt tokens looked up, once a sequence (lookups after a preemption do not count)."""
    prefix_hits_total: int = 0
    """Prompt tokens found."""
    prefill_tokens_total: int = 0
    """Prompt tokens computed, recomputation after preemption excluded."""
    recomputed_tokens_total: int = 0
    """Tokens computed again after a preemption."""
    generated_tokens_total: int = 0
    refreshes_total: int = 0
    """Times that a sequence's K and V were set to be computed anew in full precision."""
    refreshed_tokens_total: int = 0
    """Tokens computed in full precision for that."""
    preemptions_total: dict[str, int] = msgspec.field(default_factory=dict)
    """By reason."""
    evictions_total: dict[str, int] = msgspec.field(default_factory=dict)
    """Cached pages given up, by reason."""
    copies_total: int = 0
    """Pages copied on write."""
    schedule_seconds_total: float = 0.0
    execute_seconds_total: float = 0.0
    update_seconds_total: float = 0.0
    window_usage: float = 0.0
    """Share of the pages in use in the windowed KV group where that is most; 0 without such groups."""


class StepOutputs(msgspec.Struct, tag=True):
    """One message a step."""

    outputs: list[TokenOutput]
    stats: Stats


class CacheInfo(msgspec.Struct):
    """The KV pool as it was really allocated."""

    num_blocks: int
    """Of the layers that keep whole contexts."""
    block_size: int
    bytes_per_block: int
    """One page in all layers."""
    bytes_per_token: int
    dtype: str
    max_model_len: int
    """Effective window: min(model, --max-model-len, pool)."""
    enable_prefix_caching: bool
    pool_bytes: int | None = None
    """Of all KV groups, where some have fewer pages; None: `num_blocks` of each."""
    plain_bytes_per_token: int | None = None
    """What `bytes_per_token` would be in the format that the model computes in; None: it is."""
    scales: str | None = None
    """The file of scales that hold for all tokens; None: there is none."""
    fitted_layers: int = 0
    """Layers whose keys were fitted at start."""
    divergence: float | None = None
    """What the check at start measured, nats a token from the plain cache's answers; None: the format was not tried."""
    agreement: float | None = None
    """Share of the tokens after which it expected the same one as the plain cache."""
    refresh_interval: int | None = None
    """Generated tokens after which a sequence's keys and values are computed anew; None: never."""

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block if self.pool_bytes is None else self.pool_bytes


class EngineReady(msgspec.Struct, tag=True):
    """Sent once, when the model is loaded and warm."""

    cache: CacheInfo
    summary: dict[str, str]
    """Lines of the start-up block: model, parameters, dtype, device, attention kernel and refusals, exactness."""
    vocab_size: int


class EngineLoading(msgspec.Struct, tag=True):
    """Progress while loading, for /readyz and the terminal."""

    phase: str
    fraction: float = 0.0


class EngineFailed(msgspec.Struct, tag=True):
    """The last message of an engine that ends by an error. `startup` tells a clean refusal from a crash."""

    message: str
    startup: bool


class KVReport(msgspec.Struct, tag=True):
    query_id: int
    memory: dict[str, int | float]
    """`LLM.memory_stats()`: total_pages, used_pages, cached_pages, free_pages, utilization, slot_utilization,
    active_requests, bytes_per_page, bytes_per_token, total_bytes."""
    events: list[dict[str, str | int | float | None]]
    """Newest last: allocation, hit, miss, eviction, copy, preemption, refresh, wait, each with its reason."""


class PrefixCacheReset(msgspec.Struct, tag=True):
    query_id: int
    pages: int
    """How many were given up; those in use stay."""


FromEngine = StepOutputs | EngineReady | EngineLoading | EngineFailed | KVReport | PrefixCacheReset


# ------------------------------------------------------------------ scheduler -> executor -> scheduler
class NewRow(msgspec.Struct):
    """A sequence that enters a slot: for the first time, or again after a preemption."""

    slot: int
    request_id: str
    token_ids: list[int]
    """Prompt and, after a preemption, what was generated so far."""
    num_prompt_tokens: int
    params: SamplingParams
    index: int
    """Choice index, for the generator's key."""
    block_ids: list[list[int]]
    """By KV group; 0 where a windowed group's part of a block has left the window and is never read again."""
    num_computed: int
    """Tokens whose K and V the blocks hold already (prefix hit)."""


class Transfer(msgspec.Struct):
    """A block moved between tiers. The plan's transfer part; executed before the step's copies."""

    kind: Literal["load", "store"]
    block_id: int
    key: bytes


class StepPlan(msgspec.Struct):
    """Who computes how many tokens. Columns `slots`, `num_tokens` and `samples` run in parallel, decode rows first.

    The executor applies, in this order: `freed_slots`, `new_rows`, `new_blocks`, `transfers`, `copies`, then the
    forward pass; within it every layer stores all rows' K and V before any row attends.
    """

    step: int
    slots: list[int]
    num_tokens: list[int]
    samples: list[bool]
    """Whether the row's last token of this step is its sequence's last, so that a next token is drawn."""
    new_rows: list[NewRow]
    new_blocks: list[tuple[int, list[list[int]]]]
    """(slot, by KV group: block ids appended to the slot's table)"""
    copies: list[tuple[int, int, int]]
    """(KV group, source block, destination block), whole blocks, before anything of this step is written."""
    transfers: list[Transfer]
    freed_slots: list[int]
    scored_slots: list[int] = []
    """Rows that also bring log-probabilities of the prompt tokens that follow theirs."""
    refreshed_slots: list[int] = []
    """Rows that are computed in full precision: they attend to K and V as no page holds them, from the executor's
    scratch, and write both scratch and pages. The scratch holds one sequence, from its first token on: these rows are
    computed one after another, in this order. They bring nothing."""

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def rows_of(self, slots: Collection[int]) -> "StepPlan":
        """The same with the rows of these slots alone."""
        places = [place for place, slot in enumerate(self.slots) if slot in slots]
        return msgspec.structs.replace(
            self,
            slots=[self.slots[place] for place in places],
            num_tokens=[self.num_tokens[place] for place in places],
            samples=[self.samples[place] for place in places],
            scored_slots=[slot for slot in self.scored_slots if slot in slots],
            refreshed_slots=[slot for slot in self.refreshed_slots if slot in slots],
        )


class RowResult(msgspec.Struct):
    """What a sampled row brought: a list, since speculation brings several."""

    slot: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    """This row failed (non-finite logits, say): its sequence ends with finish_reason 'error'; the others go on."""


class PromptScores(msgspec.Struct):
    """Log-probabilities of neighbouring tokens of a prompt."""

    first: int
    """Place of the first of them in the prompt, at least 1."""
    logprobs: list[TokenLogprobs]
    error: str | None = None
    """As in `RowResult`."""


class StepResult(msgspec.Struct):
    """Answers the plan of the same `step`; rows in the order of the plan's sampling rows. It may come a step late."""

    step: int
    rows: list[RowResult]
    scores: dict[int, PromptScores] = {}
    """By slot, for the plan's `scored_slots`."""


# ------------------------------------------------------------------ text, inside the API process
class TextDelta(msgspec.Struct):
    """What a reader of one choice gets. Concatenated `text` is the choice's whole text."""

    index: int
    text: str
    token_ids: list[int]
    """Tokens published with this delta; text may lag behind them (partial characters, possible stop strings)."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it."""
    error: str | None = None
    cached_tokens: int = 0
    timings: Timings | None = None
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    """On a choice's first delta, if asked for: of the prompt's tokens from the second on."""


class RequestSummary(msgspec.Struct):
    """One finished sequence, for metrics and logs. Never holds text."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Published tokens: what `usage` counts."""
    max_tokens: int
    """The limit asked for, clamped to the window."""
    n: int
    finish_reason: FinishReason
    num_preemptions: int
    timings: Timings
