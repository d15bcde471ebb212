"""A model without weights: its next token is a hash of every page it was told to read.

`HashExecutor` keeps what a KV pool keeps, in small: each token slot of each block holds the token written there and a
hash of the whole context that was visible when it was written. It reads context through block tables only. A wrong,
missing, stale or doubled page changes the answer; `sequential` computes the same answers from the token lists alone.

With windowed KV groups each position is stored once more for each of them, and every row asserts that it finds there,
through that group's table, all that its window shows it.

What is computed in full precision has other hashes, made from the scratch alone: a refresh that is missing, early, late
or shared changes every token that follows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from configs.kv import WindowPages
from configs.limits import Policy, SchedulerLimits
from engine.core.kv.manager import KVManager
from engine.core.loop import EngineCore
from engine.core.scheduler import Scheduler
from engine.messages import (
    AddRequest,
    CacheInfo,
    NewRow,
    PromptScores,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenOutput,
)
from engine.ports import Masks, NoGrammar
from engine.request import Request
from engine.sampling_params import SamplingParams

VOCABULARY = 48
EOS = 7
EMPTY = (-1, -1)

Cell = tuple[int, int]
"""(token, hash of the context up to and including it)"""


def draw(cells: Iterable[Cell], params: SamplingParams, index: int, num_generated: int) -> int:
    """The next token after a context, by hash; choices differ by index, seeds differ. Honours min_tokens."""
    variant = (params.seed or 0, index) if params.temperature > 0 else (0, 0)
    token = hash((tuple(cells), variant)) % VOCABULARY
    while num_generated < params.min_tokens and (token == EOS or token in params.stop_token_ids):
        token = (token + 1) % VOCABULARY
    return token


def score(cells: Iterable[Cell], token: int) -> float:
    """A log-probability of `token` after a context, by hash."""
    return -float(hash((tuple(cells), token)) % 1000)


def sequential_scores(prompt: list[int]) -> list[float]:
    """Of the prompt's tokens from the second on."""
    cells = [EMPTY]
    scores = []
    for place, token in enumerate(prompt):
        if place:
            scores.append(score(cells[1:], token))
        cells.append(cell_after(cells[-1], token))
    return scores


def cell_after(previous: Cell, token: int) -> Cell:
    return token, hash((previous, token))


def full_cell_after(previous: Cell, token: int) -> Cell:
    """In full precision."""
    return token, hash((previous, token, "full"))


def sequential(
    prompt: list[int], params: SamplingParams, index: int, window: int, refresh_interval: int | None = None
) -> tuple[list[int], str]:
    """What one request alone must get: its tokens and its finish reason."""
    cells = [EMPTY]
    for token in prompt:
        cells.append(cell_after(cells[-1], token))
    output: list[int] = []
    if params.max_tokens == 0:
        return output, "length"
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while True:
        token = draw(cells[1:], params, index, len(output))
        output.append(token)
        if token in stops and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(prompt) + len(output) == window:
            return output, "length"
        if refresh_interval is not None and len(output) % refresh_interval == 0:
            cells = [EMPTY]
            for earlier in [*prompt, *output[:-1]]:
                cells.append(full_cell_after(cells[-1], earlier))
        cells.append(cell_after(cells[-1], token))


@dataclass
class Row:
    request_id: str
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    index: int
    tables: list[list[int]]
    """By KV group."""
    num_computed: int
    fault: str | None = None

    def places(self, index: int) -> list[tuple[int, int]]:
        """(KV group, block) of the table's entry `index`."""
        return [(group, table[index]) for group, table in enumerate(self.tables)]


@dataclass
class Handle:
    plan: StepPlan
    rows: list[RowResult]
    scores: dict[int, PromptScores]


@dataclass
class HashExecutor:
    """An `engine.ports.Executor`. Asserts what a plan promises: order, slots, tables, copies, who writes what."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    row_error: Callable[[str, int], str | None] = lambda request_id, num_generated: None
    """Faults by request and number of tokens generated before."""
    break_at: int = -1
    """Step whose forward pass raises."""
    log: list[StepPlan] = field(default_factory=list)
    keep_log: bool = False
    windows: Sequence[WindowPages] = ()

    def __post_init__(self) -> None:
        self.sizes = [self.num_blocks, *(pages.num_pages for pages in self.windows)]
        self.pools = [[[EMPTY] * self.block_size for _ in range(size)] for size in self.sizes]
        """By KV group: cells of each block."""
        self.cells = self.pools[0]
        self.rows: dict[int, Row] = {}
        self.last_step = 0
        self.num_tokens = 0
        self.num_copies = 0
        self.max_unfinished = 0
        self.scratch: list[Cell] = []
        """The leading tokens of one sequence, in full precision."""
        self._writers: dict[int, dict[tuple[int, int], str]] = {}
        """step not yet sampled -> (KV group, block) it writes -> for whom"""

    def forward(self, plan: StepPlan) -> Handle:
        assert plan.step > self.last_step and plan.slots, "steps grow and compute something"
        self.last_step = plan.step
        if self.keep_log:
            self.log.append(plan)
        if plan.step == self.break_at:
            raise RuntimeError("the device is gone")
        self._apply(plan)
        self._check_rows(plan)
        tokens_of = dict(zip(plan.slots, plan.num_tokens, strict=True))
        writes = [(self.rows[slot], tokens) for slot, tokens in tokens_of.items()]
        self._check_writers(plan, writes)
        for slot in plan.refreshed_slots:
            self._refresh(self.rows[slot], plan.num_tokens[plan.slots.index(slot)])
        writes = [(self.rows[slot], n) for slot, n in tokens_of.items() if slot not in plan.refreshed_slots]
        # Every row stores before any attends. A row that continues another's page of this step starts behind it.
        for row, tokens in sorted(writes, key=lambda write: write[0].num_computed):
            self._store(row, tokens)
        for row, tokens in writes:
            self._check_windows(row, row.num_computed - tokens)
        scores = {slot: self._score(slot, tokens_of[slot]) for slot in plan.scored_slots}
        results = [self._sample(slot) for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        self.num_tokens += plan.total_tokens
        self.max_unfinished = max(self.max_unfinished, len(self._writers))
        return Handle(plan, results, scores)

    def sample(self, handle: Handle, masks: Masks | None) -> StepResult:
        del self._writers[handle.plan.step]
        return StepResult(handle.plan.step, handle.rows, handle.scores)

    def shutdown(self) -> None:
        self.rows.clear()

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            del self.rows[slot]
        for new in plan.new_rows:
            assert new.slot not in self.rows and 0 <= new.slot < self.max_num_seqs
            self.rows[new.slot] = _row(new)
        for slot, block_ids in plan.new_blocks:
            assert len(block_ids) == len(self.pools) and len({len(ids) for ids in block_ids}) == 1 and block_ids[0]
            for table, ids in zip(self.rows[slot].tables, block_ids, strict=True):
                table += ids
        assert not plan.transfers
        sources = {(group, source) for group, source, _ in plan.copies}
        targets = {(group, target) for group, _, target in plan.copies}
        assert not sources & targets and len(targets) == len(plan.copies), "copies of one step do not touch"
        for group, source, target in plan.copies:
            assert source >= 0 and target >= 0
            self.pools[group][target] = list(self.pools[group][source])
        self.num_copies += sum(group == 0 for group, _, _ in plan.copies)

    def _check_rows(self, plan: StepPlan) -> None:
        assert len(plan.slots) == len(set(plan.slots)) == len(plan.num_tokens) == len(plan.samples)
        refreshed = set(plan.refreshed_slots)
        assert refreshed <= set(plan.slots) and len(refreshed) == len(plan.refreshed_slots)
        assert not refreshed & set(plan.scored_slots), "the scratch brings no log-probabilities"
        decodes = [n == 1 and samples for n, samples in zip(plan.num_tokens, plan.samples, strict=True)]
        assert decodes == sorted(decodes, reverse=True), "decode rows come first"
        for slot, tokens, samples in zip(plan.slots, plan.num_tokens, plan.samples, strict=True):
            row = self.rows[slot]
            end = row.num_computed + tokens
            assert tokens > 0 and end <= len(row.token_ids)
            assert not (samples and slot in refreshed), "the scratch brings no tokens"
            assert samples == (end == len(row.token_ids) and row.params.max_tokens != 0)
            for table, size in zip(row.tables, self.sizes, strict=True):
                assert end <= len(table) * self.block_size, "the table has room for what is written"
                assert all(0 <= block < size for block in table)

    def _check_writers(self, plan: StepPlan, writes: list[tuple[Row, int]]) -> None:
        """No block is written for two requests by this step and the unfinished ones; no copy's source is written."""
        mine: dict[tuple[int, int], str] = {(group, target): "" for group, _, target in plan.copies}
        for row, tokens in writes:
            first, last = row.num_computed // self.block_size, (row.num_computed + tokens - 1) // self.block_size
            for block in (place for index in range(first, last + 1) for place in row.places(index)):
                assert mine.get(block) in (None, ""), f"block {block} is written by two rows"
                mine[block] = row.request_id
        for others in self._writers.values():
            for block, request_id in mine.items():
                assert others.get(block) in (None, request_id), f"block {block} was reused while a step still wrote it"
        self._writers[plan.step] = mine

    def _store(self, row: Row, tokens: int) -> None:
        for position in range(row.num_computed, row.num_computed + tokens):
            previous = self._cell(row, position - 1) if position else EMPTY
            index, offset = divmod(position, self.block_size)
            cell = cell_after(previous, row.token_ids[position])
            for group, block in row.places(index):
                self.pools[group][block][offset] = cell
        row.num_computed += tokens

    def _refresh(self, row: Row, tokens: int) -> None:
        """Reads the scratch, writes scratch and pages."""
        start, end = row.num_computed, row.num_computed + tokens
        del self.scratch[start:]
        known = [token for token, _ in self.scratch]
        assert known == row.token_ids[:start], f"the scratch is not that of {row.request_id}"
        for position in range(start, end):
            cell = full_cell_after(self.scratch[-1] if self.scratch else EMPTY, row.token_ids[position])
            self.scratch.append(cell)
            for group, block in row.places(position // self.block_size):
                self.pools[group][block][position % self.block_size] = cell
        row.num_computed = end
        self._check_windows(row, start)

    def _score(self, slot: int, tokens: int) -> PromptScores:
        """Of the prompt tokens behind each row of this step."""
        row = self.rows[slot]
        assert row.params.prompt_logprobs is not None
        end = min(row.num_computed, row.num_prompt - 1)
        start = row.num_computed - tokens
        assert start < end, "nothing to score"
        context = [self._cell(row, position) for position in range(end)]
        logprobs = [score(context[: place + 1], row.token_ids[place + 1]) for place in range(start, end)]
        return PromptScores(start + 1, [TokenLogprobs(logprob, 1, [], []) for logprob in logprobs])

    def _sample(self, slot: int) -> RowResult:
        row = self.rows[slot]
        num_generated = len(row.token_ids) - row.num_prompt
        row.fault = row.fault or self.row_error(row.request_id, num_generated)
        if row.fault is not None:
            row.token_ids.append(-1)  # with overlap one more row of it may be planned
            return RowResult(slot, [], error=row.fault)
        context: list[Cell] = []
        for block in row.tables[0]:
            context += self.cells[block]
        token = draw(context[: row.num_computed], row.params, row.index, num_generated)
        row.token_ids.append(token)
        logprobs = [TokenLogprobs(-float(token), 1, [], [])] if row.params.logprobs is not None else None
        return RowResult(slot, [token], logprobs)

    def _check_windows(self, row: Row, start: int) -> None:
        """All rows from position `start` on find what their windows show them."""
        for group, pages in enumerate(self.windows, 1):
            for position in range(max(0, start - pages.window + 1), row.num_computed):
                found, expected = self._cell(row, position, group), self._cell(row, position)
                assert found == expected, f"group {group} has lost position {position} of {row.request_id}"

    def poison(self, group: int, blocks: Iterable[int]) -> None:
        """What nobody holds and nobody can find must not be read again before it is written."""
        for block in blocks:
            self.pools[group][block] = [EMPTY] * self.block_size

    def _cell(self, row: Row, position: int, group: int = 0) -> Cell:
        index, offset = divmod(position, self.block_size)
        return self.pools[group][row.tables[group][index]][offset]


def _row(new: NewRow) -> Row:
    return Row(
        new.request_id,
        list(new.token_ids),
        new.num_prompt_tokens,
        new.params,
        new.index,
        [list(ids) for ids in new.block_ids],
        new.num_computed,
    )


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def greedy(max_tokens: int | None, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def make_request(tokens: list[int], request_id: str = "r", sequence: int = 1, **fields: object) -> Request:
    """A request as the scheduler would make it. `fields`: of `AddRequest`."""
    params = fields.pop("params", SamplingParams(max_tokens=None))
    add = AddRequest(request_id=request_id, prompt_token_ids=tokens, params=params, arrival=0.0, **fields)
    order = (float(add.priority), sequence)
    return Request(add, order, 10_000 if params.max_tokens is None else len(tokens) + params.max_tokens, frozenset())


@dataclass
class Result:
    """What came out of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    cached_tokens: int = -1
    num_preemptions: int = 0
    steps: list[int] = field(default_factory=list)
    """Calls of `Harness.step` that brought a token."""


class Harness:
    """A core on a `HashExecutor`, and the results of what was asked of it. `check()` after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 10_000,
        prefix_caching: bool = True,
        depth: int = 1,
        max_passed_over: int = 64,
        policy: Policy = "priority",
        windows: Sequence[tuple[int, int]] = (),
        refresh_interval: int | None = None,
    ) -> None:
        """`windows`: (tokens, pages) of each windowed KV group."""
        pages = [WindowPages.plan(*window, block_size, max_num_batched_tokens) for window in windows]
        limits = SchedulerLimits(
            max_num_seqs, max_num_batched_tokens, max_model_len, max_passed_over, policy, refresh_interval
        )
        self.kv = KVManager(num_blocks, block_size, prefix_caching, windows=pages)
        self.executor = HashExecutor(num_blocks, block_size, max_num_seqs, windows=pages)
        self.scheduler = Scheduler(limits, self.kv, {EOS})
        cache = CacheInfo(num_blocks, block_size, 4096, 128, "fp32", self.scheduler.window, prefix_caching)
        self.now = 100.0
        self.core = EngineCore(self.scheduler, self.executor, NoGrammar(), cache, depth, lambda: self.now)
        self.results: dict[str, Result] = {}
        self.asked: dict[str, AddRequest] = {}
        self.num_steps = 0

    def add(self, request_id: str, prompt: list[int], params: SamplingParams | None = None, **fields: object) -> Result:
        """Returns the result, which fills as steps are taken. `fields`: of `AddRequest`."""
        params = params or SamplingParams(temperature=0.0, max_tokens=8)
        request = AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params, arrival=self.now, **fields)
        self.core.add(request)
        self.asked[request_id] = request
        self.results[request_id] = Result()
        return self.results[request_id]

    def step(self) -> list[TokenOutput]:
        outputs = self.core.step()
        self.num_steps += 1
        self.core.check()
        for group, window in enumerate(self.kv.windows, 1):
            self.executor.poison(group, window.free)
        for output in outputs:
            self._take(output)
        return outputs

    def run(self, max_steps: int = 100_000, seconds_a_step: float = 0.0) -> None:
        """Until there is no work."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
            self.now += seconds_a_step
        raise AssertionError(f"still at work after {max_steps} steps")

    def complete(self, prompt: list[int], params: SamplingParams | None = None, **fields: object) -> Result:
        """One request, alone from here on."""
        result = self.add(f"r{len(self.asked)}", prompt, params, **fields)
        self.run()
        return result

    def expected(self, request_id: str) -> tuple[list[int], str]:
        """What the request would have got alone: tokens and finish reason."""
        request, interval = self.asked[request_id], self.scheduler.limits.kv_refresh_interval
        window = self.scheduler.window
        return sequential(request.prompt_token_ids, request.params, request.index, window, interval)

    def assert_sequential(self, request_id: str) -> None:
        """A finished request got exactly what it would have got alone."""
        request, result = self.asked[request_id], self.results[request_id]
        assert (result.token_ids, result.finish_reason) == self.expected(request_id), request_id
        if request.params.prompt_logprobs is not None:
            found = [at.logprob for at in result.prompt_logprobs]
            assert found == sequential_scores(request.prompt_token_ids), request_id

    def assert_idle(self) -> None:
        """Nothing is in use any more."""
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.waiting_tokens, stats.pages_active) == (0, 0, 0, 0), stats
        assert stats.tokens_stored == stats.pages_shared == 0, stats
        assert all(window.num_active == 0 for window in self.kv.windows)

    def _take(self, output: TokenOutput) -> None:
        result = self.results[output.request_id]
        assert result.finish_reason is None, f"{output.request_id} goes on after its end"
        if not result.token_ids:
            result.cached_tokens = output.cached_tokens
        if output.token_ids:
            result.steps.append(self.num_steps)
        result.token_ids += output.token_ids
        result.logprobs += output.logprobs or []
        result.prompt_logprobs += output.prompt_logprobs or []
        result.finish_reason, result.stop_reason, result.error = (
            output.finish_reason,
            output.stop_reason,
            output.error,
        )
        result.num_preemptions = output.num_preemptions


def logged(**settings: object) -> Harness:
    """A harness that keeps its plans."""
    harness = Harness(**settings)
    harness.executor.keep_log = True
    return harness


def last_plan(harness: Harness) -> StepPlan:
    return harness.executor.log[-1]
