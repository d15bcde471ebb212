"""The KV manager: who holds which pages, what they contain, and what is shared.

One invariant carries everything: a block's bits are a function of the model, the salt, the adapter and the tokens up to
and including it, and of nothing else. So a block found by its exact tokens may stand in for computing them.

    match_prefix ─> admit ─> try_allocate … ─> free            a sequence's life
                      publish, publish_tail                    its blocks enter the tree
    open_step ─────────── seal_step ────── close_step          a step's life: planning, planned, finished

Why copies are exact. A copy's source is matched while the step is planned; only tokens computed by earlier steps
count, and the source keeps a reference until the plan is sealed. So within one step no source is evicted, handed out or
used as a destination: copies may even run side by side. What its owner writes to it lies behind the copied tokens.
Executors run a step's copies before its writes and after everything of the steps before: a source that is evicted and
written by a later step has been read by then.

Why release waits. A sequence that ends or is preempted while a step still writes its blocks keeps them until that step
is closed; nobody else can be handed a page that is about to be written.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from sys import maxsize

from engine.core.kv.block import Block, Root, RootKey
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.events import EventLog, EvictionMemory
from engine.core.kv.prefix_tree import MAX_EXAMINED, PrefixTree
from engine.request import Request


@dataclass(slots=True)
class Match:
    """What the tree has of a sequence's tokens. Valid until anything else is asked of the manager."""

    blocks: list[Block] = field(default_factory=list)
    """To be shared whole."""
    source: Block | None = None
    """To be copied, for its first `head` tokens."""
    head: int = 0
    num_tokens: int = 0
    """All in all."""


@dataclass(slots=True)
class Leaving:
    """The table of a sequence that ended while a step was still writing it."""

    last_step: int
    block_ids: list[int]
    unfilled: int


class KVManager:
    """Pages of one pool. Not thread-safe; every verb is O(blocks it hands over)."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, events: EventLog | None = None
    ) -> None:
        """`block_size`: tokens in a block."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(block_size)
        self.events = events or EventLog()
        self.finished_step = 0
        """All steps up to this one are done."""
        self.num_unfilled = 0
        """Token slots in tables that no step has been planned to write; a slot of two tables is always filled."""
        self.copies_total = 0
        self.evictions_total: Counter[str] = Counter()
        self._step = 0
        self._evicted = EvictionMemory()
        self._tables: dict[str, Request] = {}
        self._leaving: list[Leaving] = []
        self._sources: list[Block] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def num_blocks(self) -> int:
        return len(self.pool.blocks)

    @property
    def usable_tokens(self) -> int:
        """What a sequence alone in the pool can store."""
        return self.num_blocks * self.block_size

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free or evictable."""
        return self.pool.num_available

    @property
    def tokens_stored(self) -> int:
        """Token slots filled in active blocks, those of a planned step included."""
        return self.pool.num_active * self.block_size - self.num_unfilled

    @property
    def awaits_release(self) -> bool:
        """Whether blocks will come back when an unfinished step ends."""
        return bool(self._leaving)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # ---------------------------------------------------------------- a step's life
    def open_step(self, step: int) -> None:
        """Planning of `step` begins."""
        self._step = self.pool.now = self.events.step = step

    def seal_step(self, num_tokens: int) -> list[tuple[int, int]]:
        """Planning ends: the step writes `num_tokens` slots. Returns its copies, (source, destination), in order."""
        self.num_unfilled -= num_tokens
        for source in self._sources:
            self.pool.release(source)
        copies, self._copies, self._sources = self._copies, [], []
        return copies

    def close_step(self, step: int) -> None:
        """`step` and all before it are done: what they kept from being released is released."""
        self.finished_step = step
        if self._leaving:
            done = [table for table in self._leaving if table.last_step <= step]
            self._leaving = [table for table in self._leaving if table.last_step > step]
            for table in done:
                self._release(table)

    def fail_steps(self) -> None:
        """The unfinished steps never finish: withdraws what they were to compute. All tables must have been freed."""
        assert not self._tables, list(self._tables)
        last_good = self.finished_step
        self.seal_step(0)
        self.close_step(self._step)
        for block in self.pool.blocks:
            if block.parent is not None and block.computed_in > last_good:
                self._withdraw(block)

    # ---------------------------------------------------------------- a sequence's life
    def match_prefix(self, request: Request) -> Match:
        """The longest known prefix of the request's tokens; its last token always remains to be computed."""
        root = self.tree.roots.get(RootKey(request.salt, request.adapter))
        if root is None or not self.enable_prefix_caching:
            return Match()
        tokens, limit = request.token_ids, len(request.token_ids) - 1
        blocks = self.tree.walk(root, tokens, 0, limit)
        start = len(blocks) * self.block_size
        rest = tokens[start : min(start + self.block_size, limit)]
        source, head = self.tree.best_partial(blocks[-1] if blocks else root, rest, before=self._step)
        return Match(blocks, source, head, start + head)

    def footprint(self, request: Request) -> int:
        """Blocks for all the request's tokens and one for generation; no more than it can ever fill."""
        return min(self.blocks_for(len(request.token_ids)) + 1, self.blocks_for(request.max_total - 1))

    def fitting_match(self, request: Request, reserved: int) -> Match | None:
        """The request's match if its whole footprint fits behind it, `reserved` blocks left to others. Changes nothing.

        Idle blocks count as room until somebody takes them; a copy is forgone where its source has to make room.
        """
        room = self.pool.num_available - reserved
        if room <= 0:
            return None
        match = self.match_prefix(request)
        needed = self.footprint(request) - sum(block.ref_count > 0 for block in match.blocks)
        if match.source is not None and needed + (match.source.ref_count == 0) > room:
            match = Match(match.blocks, num_tokens=len(match.blocks) * self.block_size)
        return match if needed <= room else None

    def admit(self, request: Request, match: Match, num_tokens: int) -> None:
        """Gives a sequence its table: the match, and new blocks up to `num_tokens` tokens, which must fit."""
        assert not request.block_ids and match.num_tokens < num_tokens
        self._explain(request, match)
        for block in match.blocks:
            self.pool.acquire(block)
        request.block_ids = [block.id for block in match.blocks]
        request.num_published = len(match.blocks)
        if match.source is not None:
            self.pool.acquire(match.source)
            self._sources.append(match.source)
        self._tables[request.request_id] = request
        ids = self.try_allocate(request, num_tokens)
        assert ids, "admitted without room"
        if match.source is not None:
            self._copies.append((match.source.id, ids[0]))
            self.copies_total += 1
            self.events.record(
                "copy", "partial_hit", request, source=match.source.id, destination=ids[0], tokens=match.head
            )
        request.num_computed = request.num_confirmed = match.num_tokens
        self.num_unfilled -= match.head

    def extend_match(self, request: Request) -> bool:
        """Looks again for what others have computed meanwhile of a half-computed prompt, and takes whole blocks of it.

        A block that the request has begun itself is given up for a shared one. True if the table has changed. Only for
        requests without an unfinished step: nothing may still be writing that block.
        """
        size, done, start = self.block_size, request.num_computed, request.num_published * self.block_size
        if request.num_confirmed != done or done - start >= size or not self.enable_prefix_caching:
            return False
        root = self.tree.roots.get(RootKey(request.salt, request.adapter))
        parent = self.pool.blocks[request.block_ids[request.num_published - 1]] if request.num_published else root
        path = self.tree.walk(parent, request.token_ids, start, len(request.token_ids) - 1) if parent else []
        if not path:
            return False
        for block in path:
            self.pool.acquire(block)
        for block_id in reversed(request.block_ids[request.num_published :]):
            self.pool.release(self.pool.blocks[block_id])
            self.num_unfilled -= size - (done - start)
        request.block_ids[request.num_published :] = [block.id for block in path]
        request.num_published += len(path)
        request.num_computed = request.num_confirmed = start + len(path) * size
        self.events.record(
            "hit", "ahead", request, tokens=request.num_computed - done, blocks=len(path), position=request.num_computed
        )
        return True

    def try_allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Appends blocks until the table has room for `num_tokens` tokens. Returns their ids.

        None, and nothing changed, if too few are left.
        """
        count = self.blocks_for(num_tokens) - len(request.block_ids)
        if count > self.pool.num_available:
            return None
        if count <= 0:
            return []
        shortage = count - self.pool.num_free
        if shortage > 0:
            self._evict(shortage, request)
        ids = [self.pool.take().id for _ in range(count)]
        request.block_ids += ids
        self.num_unfilled += count * self.block_size
        generating = request.num_computed >= max(request.num_prompt, request.num_reached)
        reason = "generation" if generating else "recomputation" if request.num_preemptions else "prompt"
        self.events.record("allocation", reason, request, blocks=count)
        return ids

    def publish(self, request: Request, num_tokens: int, step: int) -> None:
        """Enters the full blocks among the first `num_tokens` tokens, which `step` or one before it computes.

        A block that doubles an idle one takes its place. One that doubles a block in use stays private, and so do the
        blocks behind it, until a later call finds the other idle or gone.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(request.num_published, num_tokens // size):
            block = self.pool.blocks[request.block_ids[index]]
            if block.parent is not None:
                self.tree.remove(block)  # it was open
            tokens = tuple(request.token_ids[index * size : (index + 1) * size])
            parent = self._parent(request, index)
            twin = parent.children.get(tokens)
            if twin is None:
                self.tree.insert(parent, block, tokens)
            elif twin.ref_count == 0:
                self.tree.replace(twin, block)
                self.pool.discard(twin)
                self.evictions_total["duplicate"] += 1
                self.events.record("eviction", "duplicate", request, blocks=1, tokens=size)
            else:
                return
            block.computed_in = step
            request.num_published = index + 1

    def publish_tail(self, request: Request, step: int) -> None:
        """Enters the confirmed head of the last block as an open node, unless a sibling holds as much."""
        index, length = divmod(request.num_confirmed, self.block_size)
        if not length or index != request.num_published or not self.enable_prefix_caching:
            return
        block = self.pool.blocks[request.block_ids[index]]
        tokens = tuple(request.token_ids[index * self.block_size : request.num_confirmed])
        if block.parent is not None:
            block.tokens = tokens
        else:
            parent = self._parent(request, index)
            _, known = self.tree.best_partial(parent, tokens, before=maxsize)
            if known == length:
                return
            self.tree.insert(parent, block, tokens)
        block.computed_in = step

    def free(self, request: Request, keep: bool = True) -> None:
        """Takes a sequence's table away; what it confirmed stays cached.

        keep=False: its contents are in doubt; blocks that nobody else holds or has built upon leave the tree.
        """
        if keep:
            self.publish(request, request.num_confirmed, request.last_step)
            self.publish_tail(request, request.last_step)
        else:
            for block_id in reversed(request.block_ids):
                block = self.pool.blocks[block_id]
                if block.ref_count > 1 or block.heads:
                    break
                if block.parent is not None:
                    self.tree.remove(block)
        unfilled = len(request.block_ids) * self.block_size - request.num_computed
        table = Leaving(request.last_step, request.block_ids, unfilled)
        del self._tables[request.request_id]
        request.block_ids = []
        request.num_computed = request.num_confirmed = request.num_published = 0
        if table.last_step > self.finished_step:
            self._leaving.append(table)
        else:
            self._release(table)

    # ---------------------------------------------------------------- invariants
    def check(self) -> None:
        """Asserts every invariant of pool, tree and tables, outside of planning. O(blocks + tokens)."""
        assert not self._sources and not self._copies, "a step is being planned"
        tables = [table.block_ids for table in self._leaving]
        tables += [request.block_ids for request in self._tables.values()]
        references = Counter(block_id for table in tables for block_id in table)
        for block in self.pool.blocks:
            assert block.ref_count == references[block.id], (block, references[block.id])
        self.pool.check()
        assert self.tree.check() == sum(block.parent is not None for block in self.pool.blocks)
        unfilled = sum(table.unfilled for table in self._leaving)
        for request in self._tables.values():
            self._check_table(request)
            unfilled += len(request.block_ids) * self.block_size - request.num_computed
        assert self.num_unfilled == unfilled, (self.num_unfilled, unfilled)

    def _check_table(self, request: Request) -> None:
        size, ids, tokens = self.block_size, request.block_ids, request.token_ids
        assert len(set(ids)) == len(ids), f"{request.request_id}: a block stands twice in one table"
        assert len(ids) * size >= request.num_computed >= request.num_published * size
        parent: Block | None = self.tree.roots.get(RootKey(request.salt, request.adapter))
        for index, block_id in enumerate(ids):
            block = self.pool.blocks[block_id]
            held = tokens[index * size : (index + 1) * size]
            if index < request.num_published:
                assert block.tokens == tuple(held) and block.parent is parent, (request.request_id, index)
            elif block.parent is not None:  # the open tail: only what has been written
                assert index == request.num_published and block.parent is parent, (request.request_id, index)
                assert list(block.tokens) == held[: min(len(block.tokens), request.num_computed - index * size)]
            if block.ref_count > 1:
                assert index < request.num_published, (
                    f"{request.request_id} would write block {block_id}, which is shared"
                )
            parent = block

    # ---------------------------------------------------------------- inside
    def _parent(self, request: Request, index: int) -> Block:
        if index == 0:
            return self.tree.root(RootKey(request.salt, request.adapter))
        return self.pool.blocks[request.block_ids[index - 1]]

    def _release(self, table: Leaving) -> None:
        """Last block first: children go idle before their parents."""
        blocks, release = self.pool.blocks, self.pool.release
        for block_id in reversed(table.block_ids):
            release(blocks[block_id])
        self.num_unfilled -= table.unfilled

    def _evict(self, count: int, request: Request) -> None:
        tokens = idle = 0
        for _ in range(count):
            block = self.pool.oldest
            assert block is not None
            tokens, idle = tokens + len(block.tokens), self._step - block.last_use
            if len(block.tokens) == self.block_size:
                self._evicted.remember(block)
            self.tree.remove(block)
            self.pool.discard(block)
        self.evictions_total["allocation"] += count
        self.events.record("eviction", "allocation", request, blocks=count, tokens=tokens, idle_steps=idle)

    def _withdraw(self, top: Block) -> None:
        """Takes `top` and everything below it, all idle, out of the tree."""
        below, queue = [], [top]
        while queue:
            block = queue.pop()
            below.append(block)
            queue += [child for children in block.heads.values() for child in children]
        for block in reversed(below):
            self.tree.remove(block)
            self.pool.discard(block)
        self.evictions_total["failed_step"] += len(below)

    def _explain(self, request: Request, match: Match) -> None:
        """Records how far the prompt hit, and what kept it from hitting further."""
        self.events.record(
            "hit" if match.num_tokens else "miss",
            self._reason(request, match),
            request,
            tokens=match.num_tokens,
            prompt_tokens=request.num_prompt,
            blocks=len(match.blocks),
            position=match.num_tokens,
        )

    def _reason(self, request: Request, match: Match) -> str:
        if not self.enable_prefix_caching:
            return "caching_is_off"
        if match.num_tokens == len(request.token_ids) - 1:
            return "whole_prompt"
        start = len(match.blocks) * self.block_size
        wanted = tuple(request.token_ids[start : start + self.block_size])
        key = RootKey(request.salt, request.adapter)
        parent: Block | None = match.blocks[-1] if match.blocks else self.tree.roots.get(key)
        if self._evicted.holds(parent or Root(key), wanted):
            return "evicted"
        if match.num_tokens == 0:
            others = islice((root for other, root in self.tree.roots.items() if other != key), MAX_EXAMINED)
            if any(wanted in root.children for root in others):
                return "other_salt"
        if parent is None:
            return "nothing_cached"
        return "diverged" if parent.heads else "end_of_cache"
