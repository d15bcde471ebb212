"""One sequence as the scheduler sees it."""

import enum

from engine.messages import AddRequest, FinishReason, Timings
from engine.sampling_params import SamplingParams


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Batch:
    """What the sequences of one HTTP request share, for as long as one of them is open."""

    __slots__ = ("__weakref__", "is_served")

    def __init__(self) -> None:
        self.is_served = False
        """One of them has been scheduled."""


class Request:
    """Three numbers chase one another: num_confirmed <= num_computed <= len(token_ids) + num_in_flight.

        token_ids      |■■■■■■■■■■ prompt ■■■■■■■■■■|■■■ generated ■■■|□ in flight
        num_confirmed  ───────────────>             K and V written by a finished step
        num_computed   ────────────────────>        K and V written by a step that was planned

    A preemption or a refresh sets num_computed and num_confirmed back to 0; what was generated stays.
    """

    __slots__ = (
        "__weakref__", "adapter", "arrival", "batch", "batch_id", "block_ids", "cached_tokens", "deadline", "error",
        "finish_reason", "group", "halts_at", "index", "last_step", "max_total", "num_computed", "num_confirmed",
        "num_in_flight", "num_preemptions", "num_prompt", "num_published", "num_reached", "num_refreshed",
        "num_reserved", "num_scored", "order", "params", "passed_over", "prefilling", "request_id", "row_is_stale",
        "salt", "slot", "status", "stop_ids", "stop_reason", "tenant", "timings", "token_ids", "wait_reason",
        "window_starts",
    )  # fmt: skip

    def __init__(
        self,
        add: AddRequest,
        order: tuple[float, int],
        max_total: int,
        eos_token_ids: frozenset[int],
        refresh_interval: int | None = None,
    ) -> None:
        """`max_total`: tokens, prompt included, at which the sequence ends by 'length'; `refresh_interval`: generated
        tokens after which it is refreshed (`core/refresh.py`), None: never."""
        self.request_id = add.request_id
        self.params: SamplingParams = add.params
        self.token_ids: list[int] = list(add.prompt_token_ids)
        self.num_prompt = len(add.prompt_token_ids)
        self.group, self.index, self.batch_id = add.group, add.index, add.batch
        self.batch: Batch | None = None
        self.salt, self.adapter, self.tenant = add.salt, add.adapter, add.tenant
        self.arrival, self.deadline = add.arrival, add.deadline
        self.order = order
        """Kept for life: smaller runs first and is never preempted for a larger one (`core/policy.py`)."""
        self.max_total = max_total
        self.halts_at = max_total if refresh_interval is None else min(max_total, self.num_prompt + refresh_interval)
        """Tokens at which it has no further row for now: it ends there, or is refreshed."""
        self.stop_ids = frozenset(add.params.stop_token_ids) | (frozenset() if add.params.ignore_eos else eos_token_ids)

        self.status, self.slot = Status.WAITING, -1
        self.block_ids: list[int] = []
        self.window_starts: list[int] = []
        """Of each windowed KV group: index of the first block whose extent is held, as is that of every later one."""
        self.num_computed = self.num_confirmed = 0
        self.num_in_flight = 0
        """Tokens that unfinished steps will bring."""
        self.num_published = 0
        """Leading blocks that stand in the prefix tree."""
        self.num_reserved: list[int] = []
        """By KV group: pages promised at admission that the prompt has not taken yet."""
        self.num_scored = 0
        """Tokens of the prompt, the first apart, whose log-probabilities have been brought."""
        self.num_reached = 0
        """The largest num_computed before a preemption: up to there everything is computed again."""
        self.num_refreshed = 0
        """Leading tokens that are computed in full precision, into pages of its own; 0 before the first refresh."""
        self.prefilling = False
        """Running, and more than one token behind."""
        self.row_is_stale = False
        """The executor's row must be entered again: the table has changed otherwise than by appending."""
        self.last_step = 0
        """The last step that has a row of it."""
        self.passed_over = 0
        """Steps in which a request with a larger key was admitted instead."""
        self.wait_reason = ""
        """Why it was not admitted when it was last looked at."""

        self.cached_tokens = -1
        """Prompt tokens found in the cache, at the first admission or before the prompt was computed; -1 before it."""
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.timings = Timings(arrival=add.arrival)

    @property
    def wants_scores(self) -> bool:
        """Log-probabilities of its prompt are still missing."""
        return self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache: never the last one, none whose row has something to score, and none of
        a sequence that was refreshed."""
        if self.num_refreshed:
            return 0
        return self.num_scored if self.wants_scores else len(self.token_ids) - 1

    @property
    def chunk_end(self) -> int:
        """Where its next chunk ends at the latest: what is computed in full precision is computed apart."""
        return self.num_refreshed if self.num_computed < self.num_refreshed else len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known or on their way."""
        return len(self.token_ids) + self.num_in_flight
