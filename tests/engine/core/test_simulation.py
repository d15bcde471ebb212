"""Random days of a scheduler: whatever happens, each answer is the one the request would have got alone.

Prompts come from a two-token alphabet over a few common stems, pools are small and pages tiny, so that hits, copies,
evictions and preemptions happen all the time. The fake model's answer depends on every page it reads. Half of the days
have layers with sliding windows, whose pools are often as small as they may be. On others sequences are refreshed.
"""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from fakes import Harness, sequential_scores

from engine.core.kv.match import Match
from engine.errors import ContextLengthExceeded
from engine.request import Request
from engine.sampling_params import SamplingParams

REQUESTS_PER_DAY = 25


@dataclass
class Seen:
    """What a simulation must have met at least once to mean anything."""

    preemptions: int = 0
    copies: int = 0
    evictions: int = 0
    duplicates: int = 0
    hits: int = 0
    ahead: int = 0
    aborted: int = 0
    failed: int = 0
    expired: int = 0
    refused: int = 0
    stopped: int = 0
    overlapped: int = 0
    overtaken: int = 0
    finished: int = 0
    scored: int = 0


@dataclass
class SeenInWindows:
    """The same of days with windows."""

    window_hits: int = 0
    """Of prompts longer than a window."""
    window_evictions: int = 0
    window_misses: int = 0
    """Known further, but not all that the next row sees."""
    short_of_extents: int = 0
    """Preemptions while blocks were left."""
    waits: int = 0
    """Admissions refused while blocks were left."""


@dataclass
class SeenInRefreshes:
    """The same of days with refreshes."""

    refreshes: int = 0
    turns: int = 0
    """Waits for another's refresh."""
    refreshes_preempted: int = 0
    """Amid their refresh."""
    refreshes_aborted: int = 0
    recomputed: int = 0
    """Sequences that were refreshed and preempted later, which the rule brings back."""
    preempted_when_due: int = 0
    """The token that made them due was still in flight."""
    ended_when_due: int = 0


class Day:
    """One engine with random settings, and a random course of events."""

    def __init__(self, seed: int, windowed: bool, refreshed: bool = False) -> None:
        self.random = random.Random(seed)
        r = self.random
        num_blocks, block_size = r.choice([8, 12, 20, 20, 40]), r.choice([2, 4, 4, 8])
        num_seqs, budget = r.choice([1, 3, 8, 8, 16]), r.choice([1, 3, 7, 8, 16, 64, 10_000])
        if refreshed:  # small steps, so that refreshes take several
            budget = r.choice([1, 3, 7, 8, 8, 64])
        self.harness = Harness(
            num_blocks=num_blocks * 2 if windowed else num_blocks,
            block_size=block_size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            windows=windows(random.Random(seed), block_size, budget) if windowed else (),
            max_model_len=r.choice([30, 60, 10_000]),
            prefix_caching=r.random() < 0.85,
            depth=r.choice([1, 1, 2, 2, 3]),
            max_passed_over=r.choice([0, 2, 64]),
            refresh_interval=r.choice([1, 3, 8, 12, 20]) if refreshed else None,
        )
        self.interval = self.harness.scheduler.limits.kv_refresh_interval
        self.alphabet = r.choice([2, 2, 3, 10])
        self.stems = [self.tokens(r.randrange(1, 40)) for _ in range(r.choice([1, 2, 5]))]
        self.watch_for_shortage()
        self.open: set[str] = set()
        self.cut: set[str] = set()
        """Aborted, or failing by the executor: they get the beginning of their answer."""
        self.failing: dict[str, int] = {}
        self.harness.executor.row_error = self.row_error
        self.seen, self.seen_in_windows, self.seen_in_refreshes = Seen(), SeenInWindows(), SeenInRefreshes()
        self.count = 0

    def watch_for_shortage(self) -> None:
        """Counts when a windowed group alone stood in the way."""
        kv, scheduler = self.harness.kv, self.harness.scheduler
        preempt, fitting = scheduler._preempt, kv.fitting_match

        def counting_preempt(victim: Request, beneficiary: Request) -> None:
            self.seen_in_windows.short_of_extents += kv.num_available > 0
            self.watch_refreshes(victim)
            preempt(victim, beneficiary)

        def counting_match(request: Request) -> Match | None:
            match = fitting(request)
            enough = kv.num_available - kv.num_reserved[0] >= kv.footprint(request)
            self.seen_in_windows.waits += match is None and enough
            return match

        scheduler._preempt, kv.fitting_match = counting_preempt, counting_match

    def watch_refreshes(self, victim: Request) -> None:
        """Counts what a preemption means for its victim's refreshes."""
        seen = self.seen_in_refreshes
        amid = self.harness.scheduler.refreshes.current is victim
        seen.refreshes_preempted += amid
        seen.recomputed += victim.num_refreshed > 0 and not amid
        seen.preempted_when_due += victim.num_in_flight > 0 and victim.num_tokens == victim.halts_at < victim.max_total

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.alphabet) for _ in range(count)]

    def row_error(self, request_id: str, num_generated: int) -> str | None:
        return "not a number" if self.failing.get(request_id, -1) == num_generated else None

    def prompt(self) -> list[int]:
        r, stem = self.random, self.random.choice(self.stems)
        kind = r.random()
        if kind < 0.3:
            return list(stem)
        if kind < 0.6:
            return stem[: r.randrange(1, len(stem) + 1)] + self.tokens(r.randrange(0, 12))
        if kind < 0.8 and self.harness.asked:  # the next turn of a conversation
            last = self.harness.asked[r.choice(list(self.harness.asked))]
            answer = self.harness.results[last.request_id].token_ids
            return (last.prompt_token_ids + answer + self.tokens(r.randrange(0, 5)))[:60]
        return self.tokens(r.randrange(1, 50))

    def params(self) -> SamplingParams:
        r = self.random
        prompt_logprobs = r.choice([None, None, None, 0])
        max_tokens = r.choice([1, 2, 5, 20, 40, None] if prompt_logprobs is None else [0, 0, 3, 20])
        return SamplingParams(
            temperature=r.choice([0.0, 1.0]),
            seed=r.randrange(3),
            max_tokens=max_tokens,
            min_tokens=min(r.choice([0, 0, 3]), 3 if max_tokens is None else max_tokens),
            ignore_eos=r.random() < 0.3 and max_tokens is not None,
            stop_token_ids=r.choice([(), (3, 11)]),
            logprobs=r.choice([None, 0]),
            prompt_logprobs=prompt_logprobs,
        )

    def arrive(self) -> None:
        r, harness = self.random, self.harness
        prompt, params, n = self.prompt(), self.params(), r.choice([1, 1, 1, 2, 3])
        rival = r.choice(sorted(self.open)) if self.open and r.random() < 0.2 else None
        if rival is not None:  # what somebody else is computing just now, and more urgently
            prompt = harness.asked[rival].prompt_token_ids
        group = f"g{self.count}" if n > 1 and r.random() < 0.5 else None  # choices, or simply the same prompt again
        fields = {
            "group": group,
            "salt": harness.asked[rival].salt if rival else r.choice([None, None, "a", "b"]),
            "adapter": harness.asked[rival].adapter if rival else r.choice([None, None, "a"]),
            "priority": -99 if rival else r.choice([0, 0, -1, 2]),
            "deadline": harness.now + r.randrange(1, 60) if r.random() < 0.15 else None,
        }
        for index in range(n):
            request_id = f"r{self.count}"
            self.count += 1
            try:
                harness.add(request_id, prompt, params, index=index, **fields)
            except ContextLengthExceeded:
                assert len(prompt) + (params.max_tokens != 0) > harness.scheduler.window
                self.seen.refused += 1
                continue
            self.open.add(request_id)
            if r.random() < 0.08:
                self.failing[request_id] = r.randrange(3)

    def abort(self) -> None:
        request_id = self.random.choice(sorted(self.open))
        current = self.harness.scheduler.refreshes.current
        self.seen_in_refreshes.refreshes_aborted += current is not None and current.request_id == request_id
        self.harness.core.abort([request_id, "never heard of"], self.random.choice(["abort", "stop"]))
        self.open.discard(request_id)
        self.cut.add(request_id)
        self.harness.core.check()

    def preempt(self) -> None:
        """Somebody, as if pages had run out; rather whoever is being refreshed, which hardly ever happens by itself."""
        scheduler = self.harness.scheduler
        current = scheduler.refreshes.current
        victim = current if current and self.random.random() < 0.5 else self.random.choice(scheduler.running.items)
        scheduler._preempt(victim, victim)
        self.harness.core.check()

    def live(self) -> None:
        r, harness = self.random, self.harness
        rush = r.choice([0.05, 0.3, 0.9])
        while self.count < REQUESTS_PER_DAY or harness.core.has_work:
            if self.count < REQUESTS_PER_DAY and r.random() < rush:
                self.arrive()
            elif self.open and r.random() < 0.03:
                self.abort()
            elif self.interval and harness.scheduler.running.items and r.random() < 0.03:
                self.preempt()
            elif harness.core.has_work:
                harness.now += 1.0
                outputs = harness.step()
                assert harness.core.stats().scheduled_tokens <= harness.scheduler.limits.max_num_batched_tokens
                for output in outputs:
                    if output.finish_reason is not None:
                        self.open.discard(output.request_id)
        assert not self.open
        harness.assert_idle()
        self.judge()

    def judge(self) -> None:
        harness, seen = self.harness, self.seen
        for request_id, request in harness.asked.items():
            result = harness.results[request_id]
            tokens, reason = harness.expected(request_id)
            if request_id in self.cut:
                seen.aborted += 1
            elif result.finish_reason == "error":
                seen.failed += result.error == "not a number"
                seen.expired += result.error != "not a number"
            else:
                assert (result.token_ids, result.finish_reason) == (tokens, reason), request_id
                seen.finished += 1
                seen.stopped += reason == "stop"
            assert result.token_ids == tokens[: len(result.token_ids)], request_id
            if request.params.logprobs is not None:
                assert [logprob.logprob for logprob in result.logprobs] == [-token for token in result.token_ids]
            if request.params.prompt_logprobs is not None:
                scores = sequential_scores(request.prompt_token_ids)
                found = [at.logprob for at in result.prompt_logprobs]
                whole = len(scores) if result.finish_reason in ("stop", "length") else len(found)
                assert found == scores[:whole], request_id
                seen.scored += bool(found)
            assert result.cached_tokens < len(request.prompt_token_ids)
        stats, events = harness.core.stats(), Counter((e["kind"], e["reason"]) for e in harness.core.events(10_000))
        assert stats.generated_tokens_total >= sum(len(result.token_ids) for result in harness.results.values())
        seen.preemptions += sum(stats.preemptions_total.values())
        seen.copies += stats.copies_total
        seen.evictions += stats.evictions_total.get("allocation", 0)
        seen.duplicates += stats.evictions_total.get("duplicate", 0)
        seen.hits += stats.prefix_hits_total
        seen.ahead += events["hit", "ahead"]
        seen.overlapped += harness.executor.max_unfinished > 1
        seen.overtaken += events["wait", "no_pages"]
        self.judge_windows()
        self.judge_refreshes(events)

    def judge_windows(self) -> None:
        seen, harness = self.seen_in_windows, self.harness
        evicted = harness.core.stats().evictions_total.get("window", 0)
        for event in harness.core.events(10_000):
            lookup = event["kind"] in ("hit", "miss")
            seen.window_misses += lookup and event["reason"] == "window_evicted"
            windows = [pool.window for pool in harness.kv.windows]
            seen.window_hits += bool(windows) and event["kind"] == "hit" and event["tokens"] > max(windows)
        seen.window_evictions += evicted

    def judge_refreshes(self, events: Counter[tuple[str, str]]) -> None:
        seen, harness, stats = self.seen_in_refreshes, self.harness, self.harness.core.stats()
        seen.refreshes += stats.refreshes_total
        seen.turns += events["wait", "refresh"]
        assert stats.prefix_queries_total <= sum(len(request.prompt_token_ids) for request in harness.asked.values())
        assert stats.recomputed_tokens_total == 0 or stats.preemptions_total
        if self.interval is None:
            assert stats.refreshes_total == stats.refreshed_tokens_total == events["refresh", "interval"] == 0
            return
        lengths = [len(result.token_ids) for result in harness.results.values() if result.token_ids]
        assert stats.refreshes_total >= sum((length - 1) // self.interval for length in lengths)
        seen.ended_when_due += sum(length % self.interval == 0 for length in lengths)


def windows(r: random.Random, block_size: int, budget: int) -> list[tuple[int, int]]:
    """Tokens and pages of one or two windowed groups; pages from as few as there may be."""
    chosen = []
    for _ in range(r.choice([1, 1, 2])):
        window = r.choice([1, 3, 8, 9, 20])
        few = -(-(window + min(budget, 64)) // block_size) + 2
        chosen.append((window, max(2, few + r.choice([-1, 0, 0, 1, 5, 30]))))
    return chosen


def simulate(
    days: range, windowed: bool = False, refreshed: bool = False
) -> tuple[Seen, SeenInWindows, SeenInRefreshes]:
    total = Counter()
    for seed in days:
        day = Day(seed, windowed, refreshed)
        try:
            day.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        total.update(vars(day.seen) | vars(day.seen_in_windows) | vars(day.seen_in_refreshes))
    kinds = Seen, SeenInWindows, SeenInRefreshes
    seen, in_windows, in_refreshes = (kind(**{name: total[name] for name in vars(kind())}) for kind in kinds)
    return seen, in_windows, in_refreshes


def test_500_requests_get_what_they_would_get_alone():
    seen, *_ = simulate(range(152, 152 + 500 // REQUESTS_PER_DAY))
    assert all(vars(seen).values()), seen


def test_500_requests_with_windows_get_what_they_would_get_alone():
    *seen, _ = simulate(range(185, 185 + 500 // REQUESTS_PER_DAY), windowed=True)
    assert all(all(vars(part).values()) for part in seen), seen


def test_500_requests_with_refreshes_get_what_they_would_get_alone():
    seen, _, in_refreshes = simulate(range(308, 308 + 500 // REQUESTS_PER_DAY), refreshed=True)
    assert all(all(vars(part).values()) for part in (seen, in_refreshes)), (seen, in_refreshes)


def test_500_requests_with_windows_and_refreshes_get_what_they_would_get_alone():
    seen = simulate(range(107, 107 + 500 // REQUESTS_PER_DAY), windowed=True, refreshed=True)
    assert all(vars(seen[-1]).values()), seen


@pytest.mark.parametrize("windowed", [False, True])
def test_nobody_is_admitted_only_to_be_thrown_out(windowed: bool):
    """Prompts alone: what was promised at admission is there when its chunk comes, also where prompts share pages."""
    for seed in range(400, 440):
        day = Day(seed, windowed)
        day.params = lambda: SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        try:
            day.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        assert day.seen.preemptions == 0, seed


@pytest.mark.slow
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("refreshed", [False, True])
def test_10_000_requests_get_what_they_would_get_alone(windowed: bool, refreshed: bool):
    seen, in_windows, in_refreshes = simulate(range(1000, 1000 + 10_000 // REQUESTS_PER_DAY), windowed, refreshed)
    assert all(vars(seen).values()), seen
    assert not windowed or all(vars(in_windows).values()), in_windows
    assert not refreshed or all(vars(in_refreshes).values()), in_refreshes
