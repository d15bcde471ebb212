"""Random days of a whole engine whose device is as late as it may be, beside what each request gets alone."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from random import Random

import numpy as np
import static_kernels
import torch
from engines import Engine, Loaded
from late_device import LateDevice

from configs.graphs import decode_sizes
from engine.messages import StepPlan, TokenOutput
from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend, ForwardBatch
from engine.runner.ahead import AheadHandle
from engine.runner.sampling.sampler import Sampled
from engine.runner.warm_up import warm_up
from engine.sampling_params import SamplingParams

WINDOW, NAN_TOKEN = 72, 250
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(40, 61))


class Poisoned(CausalLM):
    """What the head reads is NaN for sequences that end in a given token. Breaks when told to."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model, self.breaks = model, False

    def hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        if self.breaks:
            raise RuntimeError("an illegal memory access was encountered")
        hidden = self.model.hidden(batch, attention)
        bad = batch.input_ids[batch.logit_rows] == NAN_TOKEN
        return torch.where(bad[:, None], torch.nan, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)


def ahead(loaded: Loaded, device: LateDevice | None = None, graphs: bool = True, **options: object) -> Engine:
    """An engine on a late device, its decode steps captured."""
    options = {"max_num_seqs": 4, "num_blocks": 64, "block_size": 8, **options}
    engine = Engine(loaded, link=device or LateDevice(), **options)
    warm_up(engine.executor, largest=True)
    if graphs:
        engine.executor.capture(decode_sizes(options["max_num_seqs"]))
    return engine


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def take(self, output: TokenOutput) -> None:
        assert self.finish_reason is None, "published after its end"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.finish_reason, self.error = output.finish_reason, output.error


class Alone:
    """Requests one after another on the executor of the CPU, which draws as the device does."""

    def __init__(self, loaded: Loaded) -> None:
        self.engine = Engine(loaded, prefix_caching=False, block_size=8)
        sampler = self.engine.executor.sampler
        sample = sampler.sample

        def alike(logits: torch.Tensor, slots: np.ndarray, masks: object = None) -> Sampled:
            sampled, columns = sample(logits, slots, masks), sampler.columns
            for place in np.flatnonzero(columns.on_device[slots]):
                at = slots[place : place + 1]
                temperature = np.where(columns.greedy[at], 0, columns.temperature[at])
                drawn = static_kernels.draw(
                    logits[place : place + 1],
                    torch.from_numpy(temperature.astype(np.float32)),
                    torch.from_numpy(columns.top_k[at].astype(np.int32)),
                    torch.from_numpy(columns.top_p[at].astype(np.float32)),
                    torch.from_numpy(columns.min_p[at].astype(np.float32)),
                    torch.from_numpy(columns.seed[at].astype(np.int64)),
                    torch.from_numpy(columns.index[at].astype(np.int64)),
                    torch.from_numpy(sampler.rows.lengths[at]),
                )
                sampled.token_ids[place] = max(0, int(drawn))
            return sampled

        sampler.sample = alike
        self.answer = cache(self._answer)

    def expected(self, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
        return self.answer(tuple(prompt), params, 0).token_ids

    def _answer(self, prompt: tuple[int, ...], params: SamplingParams, index: int) -> Answer:
        answer = Answer()
        self.engine.add(prompt, params, index=index)
        while self.engine.core.has_work:
            for output in self.engine.core.step():
                answer.take(output)
        return answer


class Day:
    """An engine with random settings, but for those given, and a random course of events."""

    def __init__(self, loaded: Loaded, seed: int, **options: object) -> None:
        self.random = r = Random(seed)
        self.device = LateDevice(r.choice([None, seed]))
        self.engine = ahead(
            loaded,
            self.device,
            graphs=r.random() < 0.7,
            max_num_seqs=r.choice([2, 3, 5]),
            num_blocks=r.choice([10, 12, 16, 40]),
            chunk=r.choice([7, 16, 64]),
            prefix_caching=r.random() < 0.8,
            **options,
        )
        self.stems = [self.tokens(r.randrange(3, 24)) for _ in range(2)]
        self.asked: dict[str, tuple[tuple[int, ...], SamplingParams, int]] = {}
        self.answers: dict[str, Answer] = {}
        self.open: set[str] = set()
        self.aborted: set[str] = set()
        self.seen: Counter[str] = Counter()
        forward = self.engine.executor.forward

        def counting(plan: StepPlan) -> AheadHandle:
            handle = forward(plan)
            self.seen["host_steps"] += bool(handle.on_host.any())
            self.seen["mixed_draws"] += bool(handle.on_host.any() and not handle.on_host.all())
            self.seen["copies"] += bool(plan.copies)
            self.seen["in_flight"] += bool(len(handle.places)) and not handle.needs_host
            self.seen["resumed"] += sum(len(row.token_ids) > row.num_prompt_tokens for row in plan.new_rows)
            return handle

        self.engine.executor.forward = counting

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(256), k=count)

    def params(self) -> SamplingParams:
        r = self.random
        common = {"max_tokens": r.choice([1, 2, 5, 9, 14]), "ignore_eos": True}
        if r.random() < 0.4:  # a finished request computes a token too many
            common |= {"stop_token_ids": tuple(range(r.choice([3, 60, 128])))}
        kind = r.choice(["greedy", "greedy", "random", "random", "top", "logprobs", "penalty", "held", "scored"])
        if kind == "greedy":
            return SamplingParams(temperature=0.0, **common)
        common |= {"temperature": r.choice([0.0, 0.7, 1.3]), "seed": r.randrange(-3, 4)}
        more = {
            "top": {"top_k": r.choice([0, 3]), "top_p": r.choice([0.7, 1.0]), "min_p": r.choice([0.0, 0.1])},
            "logprobs": {"logprobs": 2},
            "penalty": {"presence_penalty": 0.7, "repetition_penalty": 1.2},
            "held": {"min_tokens": min(3, common["max_tokens"]), "bad_words": ((5,), (7, 9))},
            "scored": {"prompt_logprobs": 1},
        }
        return SamplingParams(**common, **more.get(kind, {}))

    def arrive(self) -> None:
        r = self.random
        prompt = r.choice(self.stems)[: r.randrange(1, 25)] + self.tokens(r.randrange(1, 12))
        if r.random() < 0.1:
            prompt = [*prompt, NAN_TOKEN]
        params = self.params()
        for index in range(r.choice([1, 1, 1, 2])):
            [request_id] = self.engine.add(prompt, params, index=index)
            self.asked[request_id] = tuple(prompt), params, index
            self.answers[request_id] = Answer()
            self.open.add(request_id)

    def step(self) -> None:
        core = self.engine.core
        for output in core.step():
            self.answers[output.request_id].take(output)
            if output.finish_reason is not None:
                self.open.discard(output.request_id)
                self.seen["finished"] += 1
                self.seen["late_ends"] += output.finish_reason == "stop" and core.has_work
        core.check()

    def live(self) -> None:
        r, core = self.random, self.engine.core
        while len(self.asked) < 12 or core.has_work:
            if len(self.asked) < 12 and r.random() < 0.3:
                self.arrive()
            elif self.open and r.random() < 0.03:
                request_id = r.choice(sorted(self.open))
                self.seen["aborted_in_flight"] += core.scheduler.requests[request_id].num_in_flight
                core.abort([request_id])
                self.open.discard(request_id)
                self.aborted.add(request_id)
            elif core.scheduler.running.items and r.random() < 0.04:
                victim = r.choice(core.scheduler.running.items)
                self.seen["preempted_in_flight"] += victim.num_in_flight
                core.scheduler._preempt(victim, victim)
            else:
                self.step()
        self.seen["preemptions"] += self.engine.preemptions
        self.seen["replays"] += self.device.num_replays
        self.seen["hits"] += core.stats().prefix_hits_total

    def judge(self, alone: Alone) -> None:
        for request_id, asked in self.asked.items():
            found, expected = self.answers[request_id], alone.answer(*asked)
            if request_id in self.aborted:
                assert found.token_ids == expected.token_ids[: len(found.token_ids)], request_id
                continue
            assert found.token_ids == expected.token_ids, request_id
            assert (found.finish_reason, found.error) == (expected.finish_reason, expected.error), request_id
            self.seen["failed"] += found.finish_reason == "error"
            for name in ("logprobs", "prompt_logprobs"):
                ours, theirs = getattr(found, name), getattr(expected, name)
                if found.error:  # it depends on the chunks how much of a prompt has come before
                    ours = ours[: len(theirs)]
                    theirs = theirs[: len(ours)]
                assert [one.top_ids for one in ours] == [one.top_ids for one in theirs], (request_id, name)
                np.testing.assert_allclose([one.logprob for one in ours], [one.logprob for one in theirs], atol=1e-4)
                self.seen[name] += len(ours)


def live(loaded: Loaded, alone: Alone, days: range, **options: object) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in days:
        day = Day(loaded, seed, **options)
        try:
            day.live()
            day.judge(alone)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen.update(day.seen)
    return seen


def collect(engine: Engine, answers: dict[str, Answer]) -> None:
    for output in engine.core.step():
        answers.setdefault(output.request_id, Answer()).take(output)
    engine.core.check()


def finish(engine: Engine, answers: dict[str, Answer]) -> dict[str, Answer]:
    while engine.core.has_work:
        collect(engine, answers)
    return answers
