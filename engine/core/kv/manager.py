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

Blocks, tables and tree are those of KV group 0, which keeps whole contexts. What a block holds for layers with a window
lies in extents of other pools (`window.py`); lists "by group" have group 0 first, then one entry for each window.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize

from configs.kv import WindowPages
from engine.core.kv.block import Block, RootKey
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.events import EventLog, EvictionMemory
from engine.core.kv.explain import purpose, reason
from engine.core.kv.invariants import check_tables
from engine.core.kv.match import Match
from engine.core.kv.prefix_tree import PrefixTree
from engine.core.kv.window import WindowPool
from engine.request import Request


@dataclass(slots=True)
class Leaving:
    """The table of a sequence that ended while a step was still writing it."""

    last_step: int
    block_ids: list[int]
    window_starts: list[int]
    unfilled: int


class KVManager:
    """Pages of a model's pools. Not thread-safe; every verb is O(blocks it hands over)."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        events: EventLog | None = None,
        windows: Sequence[WindowPages] = (),
    ) -> None:
        """`block_size`: tokens in a block; `windows`: the pools of KV groups 1, 2, …"""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, len(windows))
        self.windows = [WindowPool(place, pages, block_size) for place, pages in enumerate(windows)]
        self.num_reserved = [0] * (1 + len(windows))
        """By group: pages promised at admission to prompts that are being computed and have not taken them yet."""
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
        self._copies: list[tuple[int, int, int]] = []

    @property
    def num_blocks(self) -> int:
        return len(self.pool.blocks)

    @property
    def usable_tokens(self) -> int:
        """What a sequence alone in the pools can store."""
        limits = [window.usable_tokens for window in self.windows]
        return min([self.num_blocks * self.block_size, *(limit for limit in limits if limit is not None)])

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free or evictable."""
        return self.pool.num_available

    @property
    def tokens_stored(self) -> int:
        """Token slots filled in active blocks, those of a planned step included."""
        return self.pool.num_active * self.block_size - self.num_unfilled

    def awaits_release(self, request: Request) -> bool:
        """Whether pages will come back when an unfinished step ends: of sequences that are gone, or have left the
        request's own windows by then."""
        return bool(self._leaving) or (bool(self.windows) and request.num_confirmed < request.num_computed)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # ---------------------------------------------------------------- a step's life
    def open_step(self, step: int) -> None:
        """Planning of `step` begins."""
        self._step = self.pool.now = self.events.step = step

    def seal_step(self, num_tokens: int) -> list[tuple[int, int, int]]:
        """Planning ends: the step writes `num_tokens` slots. Returns its copies, (group, source, destination)."""
        self.num_unfilled -= num_tokens
        for source in self._sources:
            for window in self.windows:
                window.release(source)
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
    def match_prefix(self, request: Request, copying: bool = True) -> Match:
        """The longest known prefix of the request's tokens behind which the next row finds all that it can see.

        The last token always remains to be computed. copying=False: whole blocks only.
        """
        root = self.tree.roots.get(RootKey(request.salt, request.adapter))
        if root is None or not self.enable_prefix_caching:
            return Match()
        tokens, limit = request.token_ids, request.match_limit
        blocks = self.tree.walk(root, tokens, 0, limit)
        start = len(blocks) * self.block_size
        source, head = None, 0
        if copying:
            rest = tokens[start : min(start + self.block_size, limit)]
            source, head = self.tree.best_partial(blocks[-1] if blocks else root, rest, before=self._step)
        found = self._complete([*blocks, source] if source else blocks, start + head)
        if found < start + head:
            return Match(blocks[: found // self.block_size], num_tokens=found, lacks_extents=True)
        return Match(blocks, source, head, found)

    def footprint(self, request: Request) -> int:
        """Blocks for all the request's tokens and one for generation; no more than it can ever fill."""
        return min(self.blocks_for(len(request.token_ids)) + 1, self.blocks_for(self.most_tokens(request)))

    @staticmethod
    def most_tokens(request: Request) -> int:
        """Whose K and V a sequence ever needs: the last token that is generated is never computed."""
        return max(request.max_total - 1, request.num_prompt)

    def fitting_match(self, request: Request) -> Match | None:
        """The request's match if its whole footprint fits behind it, what is promised to others left to them.

        Changes nothing. Idle pages count as room until somebody takes them; a copy is forgone where its source has to
        make room.
        """
        if self.pool.num_available <= self.num_reserved[0]:
            return None
        match = self.match_prefix(request)
        if match.source is not None and not self._fits(request, match):
            match = self.match_prefix(request, copying=False)
        return match if self._fits(request, match) else None

    def _fits(self, request: Request, match: Match) -> bool:
        footprint, source = self.footprint(request), int(match.source is not None and match.source.ref_count == 0)
        needed = footprint - sum(block.ref_count > 0 for block in match.blocks)
        if needed + source > self.pool.num_available - self.num_reserved[0]:
            return False
        return all(
            window.claim(footprint, window.first(match.num_tokens)) + int(match.source is not None)
            <= window.num_available - reserved
            for window, reserved in zip(self.windows, self.num_reserved[1:], strict=True)
        )

    def reserve(self, request: Request) -> None:
        """Keeps for a prompt under way what it has yet to take. To be called whenever that has changed."""
        self.unreserve(request)
        footprint, blocks = self.footprint(request), self.pool.blocks
        reserved = [footprint - len(request.block_ids)]
        reserved += [window.outstanding(request, blocks, footprint) for window in self.windows]
        request.num_reserved = reserved
        self.num_reserved = [total + count for total, count in zip(self.num_reserved, reserved, strict=True)]

    def unreserve(self, request: Request) -> None:
        """Its prompt is computed, or it leaves."""
        for group, count in enumerate(request.num_reserved):
            self.num_reserved[group] -= count
        request.num_reserved = []

    def admit(self, request: Request, match: Match, num_tokens: int) -> None:
        """Gives a sequence its table: the match, and new blocks up to `num_tokens` tokens, which must fit."""
        assert not request.block_ids and match.num_tokens < num_tokens
        if not request.num_refreshed:
            self._explain(request, match)
        for block in match.blocks:
            self.pool.acquire(block)
        request.block_ids = [block.id for block in match.blocks]
        request.num_published = len(match.blocks)
        request.window_starts = [window.first(match.num_tokens) for window in self.windows]
        for window, start in zip(self.windows, request.window_starts, strict=True):
            window.acquire_all(match.blocks[start:])
        source = match.source
        if source is not None:
            self.pool.acquire(source)
            for window in self.windows:
                window.acquire(source)
            self._sources.append(source)
        self._tables[request.request_id] = request
        ids = self.try_allocate(request, num_tokens)
        assert ids, "admitted without room"
        if source is not None:
            destination = ids[0][0]
            self._copies += [
                (group, source_id, new[0])
                for group, (source_id, new) in enumerate(zip([source.id, *source.extents], ids, strict=True))
            ]
            self.copies_total += 1
            self.events.record(
                "copy", "partial_hit", request, source=source.id, destination=destination, tokens=match.head
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
        path = self.tree.walk(parent, request.token_ids, start, request.match_limit) if parent else []
        if path and self.windows:
            known = [self.pool.blocks[block_id] for block_id in request.block_ids[: request.num_published]] + path
            path = known[request.num_published : self._complete(known, len(known) * size) // size]
        if not path:
            return False
        own = [self.pool.blocks[block_id] for block_id in request.block_ids[request.num_published :]]
        for block in path:
            self.pool.acquire(block)
        for window in self.windows:
            window.exchange(request, self.pool.blocks, path, start + len(path) * size)
        for block in reversed(own):
            self.pool.release(block)
            self.num_unfilled -= size - (done - start)
        request.block_ids[request.num_published :] = [block.id for block in path]
        request.num_published += len(path)
        request.num_computed = request.num_confirmed = start + len(path) * size
        self.events.record(
            "hit", "ahead", request, tokens=request.num_computed - done, blocks=len(path), position=request.num_computed
        )
        return True

    def try_allocate(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Appends blocks until the table has room for `num_tokens` tokens. Returns their ids by group; [] if it had.

        None, and nothing changed, if too few are left.
        """
        count = self.blocks_for(num_tokens) - len(request.block_ids)
        if count > self.pool.num_available:
            return None
        if count <= 0:
            return []
        if self.windows and not all(window.has_room(request, count) for window in self.windows):
            return None
        shortage = count - self.pool.num_free
        if shortage > 0:
            self._evict(shortage, request)
        blocks = [self.pool.take() for _ in range(count)]
        ids = [[block.id for block in blocks]]
        for window in self.windows:
            self._count_window_evictions(window, count - len(window.free), request)
            ids.append([window.take(block) for block in blocks])
        request.block_ids += ids[0]
        self.num_unfilled += count * self.block_size
        self.events.record("allocation", purpose(request), request, blocks=count)
        return ids

    def table_ids(self, request: Request) -> list[list[int]]:
        """By group: where the blocks of its table lie; 0 where a windowed group's has left the window."""
        ids, blocks = [list(request.block_ids)], self.pool.blocks
        for place, start in enumerate(request.window_starts):
            ids.append([0] * start + [blocks[block_id].extents[place] for block_id in ids[0][start:]])
        return ids

    def slide(self, request: Request) -> None:
        """Gives up the extents that none of its rows to come can see. To be called when `num_confirmed` has grown."""
        slid = False
        for window in self.windows:
            slid |= window.slide(request, self.pool.blocks)
        if slid and request.num_reserved:
            self.reserve(request)

    def publish(self, request: Request, num_tokens: int, step: int) -> None:
        """Enters the full blocks among the first `num_tokens` tokens, which `step` or one before it computes.

        A block that doubles an idle one takes its place. One that doubles a block in use stays private, and so do the
        blocks behind it, until a later call finds the other idle or gone.
        """
        if not self.enable_prefix_caching or request.num_refreshed:
            return
        size = self.block_size
        for index in range(request.num_published, num_tokens // size):
            block = self.pool.blocks[request.block_ids[index]]
            if block.parent is not None:
                self._unpublish(block)  # it was open
            tokens = tuple(request.token_ids[index * size : (index + 1) * size])
            parent = self._parent(request, index)
            twin = parent.children.get(tokens)
            if twin is None:
                self.tree.insert(parent, block, tokens)
            elif twin.ref_count == 0:
                self.tree.replace(twin, block)
                for window in self.windows:
                    window.inherit(twin, block)
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
        if not length or index != request.num_published or not self.enable_prefix_caching or request.num_refreshed:
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
                    self._unpublish(block)
        self.unreserve(request)
        unfilled = len(request.block_ids) * self.block_size - request.num_computed
        table = Leaving(request.last_step, request.block_ids, request.window_starts, unfilled)
        del self._tables[request.request_id]
        request.block_ids, request.window_starts = [], []
        request.num_computed = request.num_confirmed = request.num_published = 0
        if table.last_step > self.finished_step:
            self._leaving.append(table)
        else:
            self._release(table)

    # ---------------------------------------------------------------- invariants
    def check(self) -> None:
        """Asserts every invariant of pools, tree and tables, outside of planning. O(blocks + tokens)."""
        assert not self._sources and not self._copies, "a step is being planned"
        requests = self._tables.values()
        leaving = [(table.block_ids, table.window_starts) for table in self._leaving]
        check_tables(self.pool, self.windows, self.tree, requests, leaving)
        for group, reserved in enumerate(self.num_reserved):
            assert reserved == sum(request.num_reserved[group] for request in requests if request.num_reserved)
        unfilled = sum(table.unfilled for table in self._leaving)
        unfilled += sum(len(request.block_ids) * self.block_size - request.num_computed for request in requests)
        assert self.num_unfilled == unfilled, (self.num_unfilled, unfilled)

    # ---------------------------------------------------------------- inside
    def _parent(self, request: Request, index: int) -> Block:
        if index == 0:
            return self.tree.root(RootKey(request.salt, request.adapter))
        return self.pool.blocks[request.block_ids[index - 1]]

    def _complete(self, blocks: Sequence[Block], num_tokens: int) -> int:
        """The longest head of what `blocks` hold, at most `num_tokens` tokens, that can be gone on from."""
        before = -1
        while before != num_tokens:
            before = num_tokens
            for window in self.windows:
                num_tokens = window.longest(blocks, num_tokens)
        return num_tokens

    def _unpublish(self, block: Block) -> None:
        self.tree.remove(block)
        for window in self.windows:
            window.forget(block)

    def _release(self, table: Leaving) -> None:
        """Last block first: children go idle before their parents."""
        blocks, release = self.pool.blocks, self.pool.release
        for window, start in zip(self.windows, table.window_starts, strict=True):
            window.release_all(blocks[block_id] for block_id in reversed(table.block_ids[start:]))
        for block_id in reversed(table.block_ids):
            release(blocks[block_id])
        self.num_unfilled -= table.unfilled

    def reset_cache(self) -> int:
        """Gives up every page that nobody uses. Returns their number."""
        count = self.pool.num_cached
        while (block := self.pool.oldest) is not None:
            self._unpublish(block)
            self.pool.discard(block)
        if count:
            self.evictions_total["reset"] += count
            self.events.record("eviction", "reset", None, blocks=count)
        return count

    def _evict(self, count: int, request: Request) -> None:
        tokens = idle = 0
        for _ in range(count):
            block = self.pool.oldest
            assert block is not None
            tokens, idle = tokens + len(block.tokens), self._step - block.last_use
            if len(block.tokens) == self.block_size:
                self._evicted.remember(block)
            self._unpublish(block)
            self.pool.discard(block)
        self.evictions_total["allocation"] += count
        self.events.record("eviction", "allocation", request, blocks=count, tokens=tokens, idle_steps=idle)

    def _count_window_evictions(self, window: WindowPool, count: int, request: Request) -> None:
        if count > 0:
            self.evictions_total["window"] += count
            self.events.record("eviction", "window", request, blocks=count, window=window.window)

    def _withdraw(self, top: Block) -> None:
        """Takes `top` and everything below it, all idle, out of the tree."""
        below, queue = [], [top]
        while queue:
            block = queue.pop()
            below.append(block)
            queue += [child for children in block.heads.values() for child in children]
        for block in reversed(below):
            self._unpublish(block)
            self.pool.discard(block)
        self.evictions_total["failed_step"] += len(below)

    def _explain(self, request: Request, match: Match) -> None:
        """Records how far the prompt hit, and what kept it from hitting further."""
        if not self.enable_prefix_caching:
            why = "caching_is_off"
        elif match.lacks_extents:
            why = "window_evicted"
        else:
            why = reason(request, match.blocks, match.num_tokens, self.tree, self._evicted)
        self.events.record(
            "hit" if match.num_tokens else "miss",
            why,
            request,
            tokens=match.num_tokens,
            prompt_tokens=request.num_prompt,
            blocks=len(match.blocks),
            position=match.num_tokens,
        )
