"""The KV manager under random use, against memory that remembers what was written where.

Each slot of `memory` holds the whole context (root and tokens) it was written for, and for which refresh if for one.
Whatever the manager shares, copies, evicts or hands out again, every table must read back its own sequence, and every
node of the tree what it claims. In windowed groups that goes for what rows can see, and for extents that are there;
what is free forgets its contents.
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from configs.kv import WindowPages
from engine.core.kv.block import NO_EXTENT, Block, RootKey
from engine.core.kv.manager import KVManager
from engine.messages import AddRequest
from engine.request import Request
from engine.sampling_params import SamplingParams

MAX_TOKENS = 40
MAX_CHUNK = 9

Context = tuple[RootKey | tuple[str, int], tuple[int, ...]]
"""(root, or the sequence and how much of it was refreshed; tokens)"""


@dataclass
class Step:
    number: int
    rows: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, from, to)"""
    writers: dict[tuple[int, int], Request] = field(default_factory=dict)
    """(KV group, block) it writes -> for whom."""
    held_before: set[tuple[int, int]] = field(default_factory=set)
    """What was in use when planning began. Its owners write it behind what a copy takes."""


class KVMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 24),
        block_size=st.sampled_from([2, 3, 4]),
        caching=st.sampled_from([True, True, False]),
        windows=st.sampled_from([[], [], [(5, 0)], [(1, 1), (9, 3)], [(16, 12)], [(12, -2)]]),
    )
    def build(self, num_blocks: int, block_size: int, caching: bool, windows: list[tuple[int, int]]) -> None:
        """`windows`: tokens, and pages beyond the fewest with which a context may be of any length."""
        pages = [WindowPages.plan(window, 1, block_size, MAX_CHUNK) for window, _ in windows]
        pages = [replace(one, num_pages=one.max_held + more) for one, (_, more) in zip(pages, windows, strict=True)]
        self.kv = KVManager(num_blocks, block_size, caching, windows=pages)
        sizes = [num_blocks, *(one.num_pages for one in pages)]
        self.memory: list[list[list[Context | None]]] = [[[None] * block_size for _ in range(n)] for n in sizes]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.unfinished: list[Step] = []
        self.history: list[list[int]] = []
        self.step = 0
        self.arrivals = 0

    # -------------------------------------------------------------- rules
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from([None, None, "s"]),
        data=st.data(),
    )
    def arrive(self, tokens: list[int], salt: str | None, data: st.DataObject) -> None:
        """A sequence: new tokens, or a head of what another one holds or held, and new tokens."""
        others = self.history + [request.token_ids for request in self.waiting + self.running]
        if others and data.draw(st.booleans()):
            known = data.draw(st.sampled_from(others))
            again = data.draw(st.booleans())
            tokens = list(known) if again else known[: data.draw(st.integers(1, len(known)))] + tokens[:3]
        self.arrivals += 1
        limit = min(MAX_TOKENS, self.kv.usable_tokens)
        add = AddRequest(
            request_id=f"r{self.arrivals}",
            prompt_token_ids=tokens[: limit - 1],
            params=SamplingParams(max_tokens=None),
            arrival=0.0,
            salt=salt,
        )
        self.waiting.append(Request(add, self.arrivals, limit, frozenset()))

    @precondition(lambda self: len(self.unfinished) < 2)
    @rule(data=st.data(), breaks=st.sampled_from([False] * 9 + [True]))
    def plan_step(self, data: st.DataObject, breaks: bool) -> None:
        """Rows for some of the running and admission of some of the waiting; then the step runs, or breaks."""
        step = Step(self.step + 1)
        step.held_before = {place for request in self.running for place in self.places(request)}
        self.kv.open_step(step.number)
        for request in list(self.running):
            action = data.draw(st.sampled_from(["advance", "advance", "catch up", "rest", "preempt", "refresh"]))
            if action in ("preempt", "refresh"):
                self.preempt(request, refresh=action == "refresh")
            elif action != "rest":
                if action == "catch up" and request.last_step <= self.kv.finished_step:
                    self.kv.extend_match(request)
                self.advance(step, request, data.draw(st.integers(1, MAX_CHUNK)))
        for request in list(self.waiting):
            if request.last_step <= self.kv.finished_step and data.draw(st.booleans()):
                self.admit(step, request, data.draw(st.integers(1, MAX_CHUNK)))
        copies = self.kv.seal_step(sum(end - start for _, start, end in step.rows))
        if not step.rows:
            assert not copies
            return
        self.step = step.number
        if breaks:
            self.break_down()
        else:
            self.execute(step, copies)
            self.unfinished.append(step)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def finish_step(self, data: st.DataObject) -> None:
        """The oldest step is done: contents are confirmed, and who has computed everything known gets a token."""
        step = self.unfinished.pop(0)
        self.kv.close_step(step.number)
        for request, start, end in step.rows:
            if request not in self.running:
                continue
            request.num_confirmed += end - start
            self.kv.publish(request, request.num_confirmed, step.number)
            if data.draw(st.booleans()):
                self.kv.publish_tail(request, step.number)
            self.kv.slide(request)
            if request.num_confirmed == len(request.token_ids) < request.max_total - 1:
                request.token_ids.append(data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.sampled_from([True, True, True, False]))
    def end(self, data: st.DataObject, keep: bool) -> None:
        """Finished, aborted or failed, perhaps while a step still writes its pages."""
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.history.append(list(request.token_ids))
        self.kv.free(request, keep)

    # -------------------------------------------------------------- what the scheduler would do
    def admit(self, step: Step, request: Request, chunk: int) -> None:
        available = self.kv.num_available
        match = self.kv.fitting_match(request)
        assert self.kv.num_available == available
        if match is None and self.kv.windows:
            return
        if match is None:
            in_use = sum(block.ref_count > 0 for block in self.kv.match_prefix(request).blocks)
            assert self.kv.footprint(request) - in_use > available
            return
        assert match.num_tokens < len(request.token_ids)
        end = min(match.num_tokens + chunk, len(request.token_ids))
        self.waiting.remove(request)
        self.running.append(request)
        self.kv.admit(request, match, end)
        self.add_row(step, request, end)

    def advance(self, step: Step, request: Request, chunk: int) -> None:
        end = min(request.num_computed + chunk, len(request.token_ids))
        if end == request.num_computed:
            return
        before, available = list(request.block_ids), self.available
        new = self.kv.try_allocate(request, end)
        if new is None:
            assert request.block_ids == before and self.available == available
            held = [len(before) - start for start in request.window_starts]
            count = self.kv.blocks_for(end) - len(before)
            too_much = any(n + count > pool.max_held for n, pool in zip(held, self.kv.windows, strict=True))
            assert count > min(available) or (too_much and self.kv.awaits_release(request))
            return
        assert request.block_ids == before + (new[0] if new else [])
        assert [ids[len(before) :] for ids in self.kv.table_ids(request)] == (new or [[]] * len(self.memory))
        self.add_row(step, request, end)

    def add_row(self, step: Step, request: Request, end: int) -> None:
        step.rows.append((request, request.num_computed, end))
        request.num_computed, request.last_step = end, step.number
        self.kv.publish(request, end, step.number)

    def preempt(self, request: Request, refresh: bool) -> None:
        self.running.remove(request)
        self.waiting.append(request)
        request.num_preemptions += 1
        self.kv.free(request)
        if refresh:
            request.num_refreshed = max(1, len(request.token_ids) - 1)

    def execute(self, step: Step, copies: list[tuple[int, int, int]]) -> None:
        """Copies, then all rows' writes; then every row reads all that it can see."""
        size = self.kv.block_size
        for request, start, end in step.rows:
            for block in self.places(request, start // size, (end - 1) // size + 1):
                assert step.writers.setdefault(block, request) is request, "two rows write one block"
                for other in self.unfinished:
                    assert other.writers.get(block, request) is request, "reused while a step still writes it"
        sources = {(group, source) for group, source, _ in copies}
        assert not sources & {(group, destination) for group, _, destination in copies}
        assert sources & step.writers.keys() <= step.held_before, "a source was handed out before it was copied"
        for group, source, destination in copies:
            self.memory[group][destination] = list(self.memory[group][source])
        for request, start, end in step.rows:
            for position in range(start, end):
                for group, block in self.places(request, position // size, position // size + 1):
                    self.memory[group][block][position % size] = context(request, position)
        for request, start, end in step.rows:
            self.assert_reads(request, start, end)

    def break_down(self) -> None:
        """The step never runs."""
        for request in self.running:
            self.history.append(list(request.token_ids))
            self.kv.free(request)
        self.running.clear()
        self.unfinished.clear()
        self.kv.fail_steps()

    # -------------------------------------------------------------- invariants
    @invariant()
    def bookkeeping_is_sound(self) -> None:
        self.kv.check()
        filled: set[tuple[int, int]] = set()
        for request in self.running:
            for position in range(request.num_computed):
                filled.add((request.block_ids[position // self.kv.block_size], position % self.kv.block_size))
        if not self.kv._leaving:
            assert self.kv.tokens_stored == len(filled)

    @invariant()
    def what_is_free_is_forgotten(self) -> None:
        for group, pool in enumerate(self.kv.windows, 1):
            for extent in pool.free:
                self.memory[group][extent] = [None] * self.kv.block_size

    @invariant()
    def tables_hold_their_sequences(self) -> None:
        for request in self.running:
            self.assert_reads(request, request.num_confirmed, request.num_computed)

    @invariant()
    def the_tree_tells_the_truth(self) -> None:
        def walk(parent: Block, key: RootKey, tokens: tuple[int, ...]) -> None:
            for same_head in parent.heads.values():
                for child in same_head:
                    for length in range(1, len(child.tokens) + 1):
                        for group, block in enumerate([child.id, *child.extents]):
                            found = (key, tokens + child.tokens[:length])
                            assert block == NO_EXTENT or self.memory[group][block][length - 1] == found, child
                    walk(child, key, tokens + child.tokens)

        for key, root in self.kv.tree.roots.items():
            walk(root, key, ())

    @property
    def available(self) -> list[int]:
        """By KV group."""
        return [self.kv.num_available, *(pool.num_available for pool in self.kv.windows)]

    def places(self, request: Request, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """(KV group, block) of a part of its table, what has left the windows excepted."""
        blocks = [self.kv.pool.blocks[block_id] for block_id in request.block_ids]
        starts = [0, *request.window_starts]
        return [
            (group, [block.id, *block.extents][group])
            for group in range(len(self.memory))
            for block in blocks[max(start, starts[group]) : end]
        ]

    def assert_reads(self, request: Request, start: int, end: int) -> None:
        """Rows from `start` to `end` see what they should."""
        size, blocks = self.kv.block_size, [self.kv.pool.blocks[block_id] for block_id in request.block_ids]
        for group, window in enumerate([MAX_TOKENS, *(pool.window for pool in self.kv.windows)]):
            for position in range(max(0, start - window + 1), end):
                block = [blocks[position // size].id, *blocks[position // size].extents][group]
                assert block != NO_EXTENT, (request.request_id, position)
                found = self.memory[group][block][position % size]
                assert found == context(request, position), (request.request_id, group, position)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for request in self.running:
            self.kv.free(request)
        self.kv.close_step(self.step)
        self.kv.check()
        assert self.kv.pool.num_active == 0 and self.kv.tokens_stored == 0
        assert all(pool.num_active == 0 for pool in self.kv.windows)


def context(request: Request, position: int) -> Context:
    root = RootKey(request.salt, request.adapter)
    if request.num_refreshed:
        root = (request.request_id, request.num_refreshed)
    return root, tuple(request.token_ids[: position + 1])


TestKVManager = KVMachine.TestCase
TestKVManager.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.slow
def test_many_courses_of_events() -> None:
    long = settings(max_examples=1000, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(KVMachine, settings=long)
