"""Decides who computes how many tokens, and takes what came of it.

There is no prefill and no decode phase: each step every running request's `num_computed` chases its number of tokens,
within a token budget. Prefix hits, chunked prefill, recomputation and refreshes are all this one rule.

    schedule(now) ─> StepPlan ─> executor ─> StepResult ─> update(plan, result, now) ─> TokenOutputs

schedule(N+1) may be called before update(N): a request whose token is still in flight can have its next row already.
Requests are visited in order of their keys and victims are taken from the end, so nothing planned is ever unplanned.

Not here: what is in a page (`kv/`), who goes first (`policy.py`), who is refreshed (`refresh.py`), text, sampling.
"""

from collections import deque
from collections.abc import Collection
from itertools import islice

from configs.limits import SchedulerLimits
from engine.core.draft import Draft
from engine.core.kv.manager import KVManager
from engine.core.kv.match import Match
from engine.core.outputs import failure, take_row
from engine.core.policy import MAX_EXAMINED, OrderedQueue, order_key
from engine.core.refresh import Refreshes
from engine.core.slots import SlotPool
from engine.core.stats import Counters, snapshot
from engine.core.waiting import WaitingRoom
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.messages import AddRequest, FinishReason, Stats, StepPlan, StepResult, TokenOutput
from engine.request import Request, Status

_WAITING, _RUNNING, _FINISHED = Status.WAITING, Status.RUNNING, Status.FINISHED


class Scheduler:
    """Owns the requests, their slots and their tables. One thread."""

    def __init__(self, limits: SchedulerLimits, kv: KVManager, eos_token_ids: Collection[int] = ()) -> None:
        self.limits = limits
        self.kv = kv
        self.window = min(limits.max_model_len, kv.usable_tokens)
        """Most tokens of a sequence, prompt included."""
        self.counters = Counters()
        self.running = OrderedQueue()
        self.waiting = WaitingRoom(shares_prompts=kv.enable_prefix_caching)
        self.refreshes = Refreshes(limits.kv_refresh_interval)
        self.requests: dict[str, Request] = {}
        """All that have not finished."""
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequence = 0
        self._step = 0
        self._in_flight: deque[list[Request]] = deque()
        """Rows of each unfinished step."""
        self._slots = SlotPool(limits.max_num_seqs)
        self._num_prefilling = 0

    # ---------------------------------------------------------------- requests come and go
    def add(self, add: AddRequest) -> None:
        """Queues a sequence. Raises `InvalidRequest`, or `ContextLengthExceeded` where not one token can follow."""
        length = len(add.prompt_token_ids)
        if length == 0:
            raise InvalidRequest("The prompt is empty: it must have at least one token.", "prompt", "invalid_value")
        if length + (add.params.max_tokens != 0) > self.window:
            raise ContextLengthExceeded(self.window, length)
        if add.request_id in self.requests:
            raise InvalidRequest(f"A request with id {add.request_id!r} is already open.", "request_id")
        wanted = self.window if add.params.max_tokens is None else length + add.params.max_tokens
        self._sequence += 1
        order, interval = order_key(self.limits.policy, add, self._sequence), self.limits.kv_refresh_interval
        request = Request(add, order, min(wanted, self.window), self._eos_token_ids, interval)
        self.requests[request.request_id] = request
        if not self.waiting.arrive(request):
            self._note_wait(request, "first_choice")

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Ends a sequence in whatever state. Unknown ids are those that have ended by themselves."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def expire(self, now: float) -> list[TokenOutput]:
        """Fails those that are past their deadline and have never been scheduled."""
        outputs: list[TokenOutput] = []
        for request in self.waiting.expired(self.requests, now):
            self._note_wait(request, "deadline")
            waited = f"The request waited {now - request.arrival:.1f} s in the queue, past its deadline."
            outputs.append(failure(request, waited, now))
            self._finish(request, "error")
        return outputs

    def fail(self) -> None:
        """A step broke: ends everything and takes back what unfinished steps had published."""
        for request in list(self.requests.values()):
            self._finish(request, "error")
        self._in_flight.clear()
        self.kv.fail_steps()
        self._slots.settle(self.kv.finished_step)

    # ---------------------------------------------------------------- planning
    def schedule(self, now: float) -> StepPlan | None:
        """The next step, None if nobody can compute anything. Decodes first, then prompts under way, then newcomers."""
        kv, draft = self.kv, Draft(self._step + 1)
        kv.open_step(draft.step)
        budget = self._plan_running(draft, self.limits.max_num_batched_tokens)
        if self.waiting.queue and not draft.preempted:
            self._plan_waiting(draft, budget, now)
        num_tokens = draft.num_tokens
        copies = kv.seal_step(num_tokens)
        if num_tokens == 0:
            return None
        self._step = draft.step
        self._in_flight.append(draft.requests)
        self.counters.steps_total += 1
        self.counters.scheduled_tokens = num_tokens
        return draft.plan(copies, self._slots.newly_freed())

    def _plan_running(self, draft: Draft, budget: int) -> int:
        """Returns the budget that is left."""
        size, step = self.kv.block_size, draft.step
        decodes, slots = draft.decodes, draft.decode_slots
        decodes_ahead = len(self.running) - self._num_prefilling
        for request in self.running.items:  # preemption shortens the list at its end only
            if request.prefilling:
                budget -= self._plan_prefill(draft, request, budget - decodes_ahead)
                continue
            decodes_ahead -= 1
            computed = request.num_computed
            if budget <= 0 or len(request.token_ids) + request.num_in_flight >= request.halts_at:
                continue  # with its token in flight it will be complete, or due for a refresh
            if computed == len(request.block_ids) * size:
                ids = self._make_room(draft, request, computed + 1)
                if ids is None:
                    continue
                draft.new_blocks.append((request.slot, ids))
            request.num_computed = computed + 1
            request.num_in_flight += 1
            request.last_step = step
            decodes.append(request)
            slots.append(request.slot)
            budget -= 1
        return budget

    def _plan_prefill(self, draft: Draft, request: Request, budget: int) -> int:
        """The next chunk of a running request's prompt. Returns its number of tokens."""
        if budget <= 0:
            return 0
        self._catch_up(request)
        remaining = request.chunk_end - request.num_computed
        riders = self._riders(request, budget // 2) if remaining > budget // 2 > 0 else 0
        tokens = min(remaining, budget - riders)
        ids = self._make_room(draft, request, request.num_computed + tokens)
        if ids is None:
            return 0
        if tokens < remaining and draft.capped is None:
            draft.capped = request
        if request.row_is_stale:
            request.row_is_stale = False
            draft.reentered_slots.append(request.slot)
            draft.enter(request, self.kv.table_ids(request))
        elif ids:
            draft.new_blocks.append((request.slot, ids))
        self._add_chunk(draft, request, tokens)
        return tokens

    def _catch_up(self, request: Request) -> None:
        """Skips what others have computed meanwhile of the request's prompt."""
        before = request.num_computed
        if self.kv.extend_match(request):
            request.row_is_stale = True
            self.kv.reserve(request)
            if request.num_preemptions == 0:
                request.cached_tokens += request.num_computed - before
                self.counters.prefix_hits_total += request.num_computed - before

    def _riders(self, request: Request, limit: int) -> int:
        """Tokens, at most `limit`, kept for waiting requests while a long prompt is computed.

        Prompts short enough to be computed whole ride along with its chunks, and those before it in order.
        """
        wanted = 0
        for other in islice(self.waiting.queue, MAX_EXAMINED if self._slots.num_free else 0):
            match = self._fitting_match(other)
            if match is None:
                if self._may_not_be_overtaken(other):
                    break
                continue
            remaining = other.chunk_end - match.num_tokens
            if other.order < request.order:
                wanted = min(wanted + remaining, limit)
            elif wanted + remaining <= limit:
                wanted += remaining
        return wanted

    def _may_not_be_overtaken(self, request: Request) -> bool:
        """Preempted: there are too many newcomers already; to be refreshed: amid its answer; or passed over enough."""
        return request.num_preemptions + request.num_refreshed > 0 or request.passed_over >= self.limits.max_passed_over

    def _fitting_match(self, request: Request) -> Match | None:
        """None: it has to wait, for pages or for its turn to be refreshed, which is noted."""
        if self.refreshes.must_wait(request):
            self._note_wait(request, "refresh")
            return None
        if (match := self.kv.fitting_match(request)) is None:
            self._note_wait(request, "reserved" if self._may_not_be_overtaken(request) else "no_pages")
        return match

    def _plan_waiting(self, draft: Draft, budget: int, now: float) -> None:
        """Admits who fits, in order. Who does not may be overtaken: not for ever, and not after a preemption."""
        items = self.waiting.queue.items
        passed: list[Request] = []
        num_overtaken = place = 0
        while budget > 0 and self._slots.num_free and place < min(len(items), MAX_EXAMINED):
            request = items[place]
            if request.last_step > self.kv.finished_step:  # preempted just now: its last token is still to come
                self._note_wait(request, "unfinished_step")
                break
            match = self._fitting_match(request)
            if match is None:
                if self._may_not_be_overtaken(request):
                    break
                passed.append(request)
                place += 1
                continue
            remaining = request.chunk_end - match.num_tokens
            if draft.capped is not None and remaining > budget and request.order > draft.capped.order:
                self._note_wait(request, "budget")
                place += 1
                continue
            tokens = min(remaining, budget)
            budget -= tokens
            self._admit(draft, request, match, tokens, now)
            num_overtaken = len(passed)
        for request in passed[:num_overtaken]:
            request.passed_over += 1
        if items and not self._slots.num_free:
            self._note_wait(items[0], "no_slot")

    def _admit(self, draft: Draft, request: Request, match: Match, tokens: int, now: float) -> None:
        counters = self.counters
        self.waiting.take(request)
        self.kv.admit(request, match, match.num_tokens + tokens)
        if request.cached_tokens < 0:
            request.cached_tokens = match.num_tokens
            if self.kv.enable_prefix_caching:
                counters.prefix_queries_total += request.num_prompt
                counters.prefix_hits_total += match.num_tokens
            request.timings.first_scheduled = now
        request.slot = self._slots.take()
        request.status, request.prefilling, request.wait_reason = _RUNNING, True, ""
        self.running.add(request)
        self._num_prefilling += 1
        draft.enter(request, self.kv.table_ids(request))
        self._add_chunk(draft, request, tokens)

    def _add_chunk(self, draft: Draft, request: Request, tokens: int) -> None:
        """A row of a prompt, or of what a preempted request computes again."""
        start, end = request.num_computed, request.num_computed + tokens
        is_last = end == len(request.token_ids)
        samples = is_last and request.max_total > request.num_prompt
        if request.wants_scores and start < request.num_prompt - 1:
            draft.scored_slots.append(request.slot)
        request.num_computed, request.last_step = end, draft.step
        self.kv.publish(request, end, draft.step)
        self.counters.count_chunk(request, start, end)
        request.num_in_flight += samples
        if start < request.num_refreshed:
            draft.refreshed_slots.append(request.slot)
            self.refreshes.plan(request, end)
        if is_last or end == request.num_refreshed == len(request.token_ids) - 1:  # not more than a token behind
            self._end_prefill(request)
        else:
            self.kv.reserve(request)
        draft.add_chunk(request, tokens, samples)

    def _make_room(self, draft: Draft, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Pages for a running request, those of later ones if need be. None: it has no row in this step."""
        while (ids := self.kv.try_allocate(request, num_tokens)) is None:
            if self.kv.awaits_release(request):
                return None  # pages come back when a step ends
            victim = self.running.victim
            draft.preempted = True
            self._preempt(victim, request)
            if victim is request:
                return None
        return ids

    def _preempt(self, victim: Request, beneficiary: Request) -> None:
        """Back to the queue with its key; its tokens are computed again, its published pages stay cached."""
        reason = "no_pages_left" if victim is beneficiary else "yielded_to_earlier"
        self.kv.events.record("preemption", reason, victim, beneficiary, pages=len(victim.block_ids))
        self.counters.preemptions_total[reason] += 1
        victim.num_reached = max(victim.num_reached, victim.num_computed)
        victim.num_preemptions += 1
        self._put_back(victim)

    def _put_back(self, request: Request) -> None:
        self._leave(request)
        request.status = _WAITING
        self.waiting.put_back(request)

    # ---------------------------------------------------------------- results
    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOutput]:
        """Takes the result of the oldest unfinished step."""
        requests = self._in_flight.popleft()
        assert result.step == plan.step and len(requests) == len(plan.slots)
        kv, size, slides = self.kv, self.kv.block_size, bool(self.kv.windows)
        kv.close_step(plan.step)
        self._slots.settle(plan.step)
        outputs: list[TokenOutput] = []
        rows = iter(result.rows)
        for request, slot, tokens, samples in zip(requests, plan.slots, plan.num_tokens, plan.samples, strict=True):
            row = next(rows) if samples else None
            if request.status is _FINISHED:
                continue  # aborted, or finished by the step before: this token is one too many
            scores = result.scores.get(slot) if result.scores else None
            request.num_in_flight -= samples
            if error := (row and row.error) or (scores and scores.error):
                outputs.append(failure(request, error, now))
                self._finish(request, "error", keep=False)
                continue
            if request.status is _RUNNING:  # not preempted meanwhile
                before = request.num_confirmed
                request.num_confirmed = confirmed = before + tokens
                if confirmed % size < tokens:
                    kv.publish(request, confirmed, plan.step)
                if before < request.num_prompt <= confirmed:
                    kv.publish_tail(request, plan.step)
                if slides:
                    kv.slide(request)
                if request.group is not None and confirmed >= request.num_prompt:
                    self.waiting.prompt_computed(request)
            if row is not None or scores is not None or request.max_total <= request.num_confirmed:
                output = take_row(request, row, scores, now)
                outputs.append(output)
                self.counters.generated_tokens_total += len(output.token_ids)
                if request.status is _WAITING:
                    self.waiting.num_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    self._finish(request, output.finish_reason)
        for request in self.refreshes.due(requests):
            self._refresh(request)
        return outputs

    def _refresh(self, request: Request) -> None:
        """Back to the queue with its key: all but its last token is to be computed anew."""
        pages, tokens = len(request.block_ids), request.num_tokens - 1
        self.kv.events.record("refresh", "interval", request, pages=pages, tokens=tokens)
        self.counters.refreshes_total += 1
        if request.status is _RUNNING:  # not preempted meanwhile
            self._put_back(request)
        self.refreshes.begin(request)

    # ---------------------------------------------------------------- ends
    def _finish(self, request: Request, reason: FinishReason, keep: bool = True) -> None:
        """keep=False: what its pages hold is in doubt."""
        if request.status is _RUNNING:
            self._leave(request, keep)
        else:
            self.waiting.remove(request)
        request.status, request.finish_reason = _FINISHED, reason
        del self.requests[request.request_id]
        self.waiting.succeed(request)

    def _leave(self, request: Request, keep: bool = True) -> None:
        """Out of the running set; its blocks and its slot when no unfinished step has a row of it."""
        self.running.remove(request)
        self.refreshes.leave(request)
        if request.prefilling:
            self._end_prefill(request)
        self.kv.free(request, keep)
        self._slots.give_back(request.slot, request.last_step, self.kv.finished_step)
        request.slot, request.row_is_stale = -1, False

    def _end_prefill(self, request: Request) -> None:
        request.prefilling = False
        self._num_prefilling -= 1
        self.kv.unreserve(request)

    def _note_wait(self, request: Request, reason: str) -> None:
        if request.wait_reason != reason:
            request.wait_reason = reason
            self.kv.events.record("wait", reason, request)

    # ---------------------------------------------------------------- views
    def stats(self) -> Stats:
        waiting = len(self.requests) - len(self.running)
        return snapshot(self.counters, self.kv, len(self.running), waiting, self.waiting.num_tokens)

    def check(self) -> None:
        """Asserts every invariant, the KV manager's included. Not while a step is being planned."""
        self.kv.check()
        self.running.check()
        self.waiting.check([request for request in self.requests.values() if request.status is _WAITING])
        self._slots.check([request.slot for request in self.running])
        self.refreshes.check(self.running)
        assert self._num_prefilling == sum(request.prefilling for request in self.running)
        for request in self.running:
            assert request.status is _RUNNING and bool(request.num_reserved) == request.prefilling
            assert request.num_confirmed <= request.num_computed <= self.kv.most_tokens(request)
            assert request.num_computed <= request.num_tokens <= request.halts_at <= request.max_total
