"""Random days of a scheduler: whatever happens, each answer is the one the request would have got alone.

Prompts come from a two-token alphabet over a few common stems, pools are small and pages tiny, so that hits, copies,
evictions and preemptions happen all the time. The fake model's answer depends on every page it reads.
"""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from fakes import Harness, sequential

from engine.errors import ContextLengthExceeded
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


class Day:
    """One engine with random settings, and a random course of events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        r = self.random
        self.harness = Harness(
            num_blocks=r.choice([8, 12, 20, 20, 40]),
            block_size=r.choice([2, 4, 4, 8]),
            max_num_seqs=r.choice([1, 3, 8, 8, 16]),
            max_num_batched_tokens=r.choice([1, 3, 7, 8, 16, 64, 10_000]),
            max_model_len=r.choice([30, 60, 10_000]),
            prefix_caching=r.random() < 0.85,
            depth=r.choice([1, 1, 2, 2, 3]),
            max_passed_over=r.choice([0, 2, 64]),
        )
        self.alphabet = r.choice([2, 2, 3, 10])
        self.stems = [self.tokens(r.randrange(1, 40)) for _ in range(r.choice([1, 2, 5]))]
        self.open: set[str] = set()
        self.cut: set[str] = set()
        """Aborted, or failing by the executor: they get the beginning of their answer."""
        self.failing: dict[str, int] = {}
        self.harness.executor.row_error = self.row_error
        self.seen = Seen()
        self.count = 0

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
        max_tokens = r.choice([1, 2, 5, 20, 40, None])
        return SamplingParams(
            temperature=r.choice([0.0, 1.0]),
            seed=r.randrange(3),
            max_tokens=max_tokens,
            min_tokens=min(r.choice([0, 0, 3]), max_tokens or 3),
            ignore_eos=r.random() < 0.3 and max_tokens is not None,
            stop_token_ids=r.choice([(), (3, 11)]),
            logprobs=r.choice([None, 0]),
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
            "priority": -3 if rival else r.choice([0, 0, -1, 2]),
            "deadline": harness.now + r.randrange(1, 60) if r.random() < 0.15 else None,
        }
        for index in range(n):
            request_id = f"r{self.count}"
            self.count += 1
            try:
                harness.add(request_id, prompt, params, index=index, **fields)
            except ContextLengthExceeded:
                assert len(prompt) >= harness.scheduler.window
                self.seen.refused += 1
                continue
            self.open.add(request_id)
            if r.random() < 0.08:
                self.failing[request_id] = r.randrange(3)

    def abort(self) -> None:
        request_id = self.random.choice(sorted(self.open))
        self.harness.core.abort([request_id, "never heard of"], self.random.choice(["abort", "stop"]))
        self.open.discard(request_id)
        self.cut.add(request_id)
        self.harness.core.check()

    def live(self) -> None:
        r, harness = self.random, self.harness
        rush = r.choice([0.05, 0.3, 0.9])
        while self.count < REQUESTS_PER_DAY or harness.core.has_work:
            if self.count < REQUESTS_PER_DAY and r.random() < rush:
                self.arrive()
            elif self.open and r.random() < 0.03:
                self.abort()
            elif harness.core.has_work:
                harness.now += 1.0
                for output in harness.step():
                    if output.finish_reason is not None:
                        self.open.discard(output.request_id)
        assert not self.open
        harness.assert_idle()
        self.judge()

    def judge(self) -> None:
        harness, seen = self.harness, self.seen
        for request_id, request in harness.asked.items():
            result = harness.results[request_id]
            tokens, reason = sequential(
                request.prompt_token_ids, request.params, request.index, harness.scheduler.window
            )
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


def simulate(days: range) -> Seen:
    total = Counter()
    for seed in days:
        day = Day(seed)
        try:
            day.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        total.update(vars(day.seen))
    return Seen(**total)


def test_500_requests_get_what_they_would_get_alone():
    seen = simulate(range(152, 152 + 500 // REQUESTS_PER_DAY))
    assert all(vars(seen).values()), seen


@pytest.mark.slow
def test_10_000_requests_get_what_they_would_get_alone():
    seen = simulate(range(1000, 1000 + 10_000 // REQUESTS_PER_DAY))
    assert all(vars(seen).values()), seen
