"""Extents of layers with sliding windows, one rule at a time."""

from collections.abc import Callable

import pytest
from fakes import Harness, greedy, last_plan, logged, make_request, prompt

from configs.kv import WindowPages
from engine.core.kv.block import NO_EXTENT, Block
from engine.core.kv.manager import KVManager
from engine.core.kv.window import WindowPool

SIZE = 4
ONE = greedy(1)


def pool_of(num_pages: int = 4, window: int = 8) -> WindowPool:
    return WindowPool(0, WindowPages.plan(window, num_pages, SIZE, step_tokens=8), SIZE)


def block_of(number: int, in_tree: bool = False) -> Block:
    block = Block(number, 1)
    block.parent = Block(-1) if in_tree else None
    return block


def windowed(window: int = 8, pages: int = 40, **settings: object) -> Harness:
    return logged(block_size=SIZE, windows=[(window, pages)], **{"num_blocks": 64, **settings})


def lookups(harness: Harness) -> list[tuple]:
    events = harness.core.events(1000)
    return [(e["kind"], e["reason"], e["tokens"]) for e in events if e["kind"] in ("hit", "miss")]


# -------------------------------------------------------------------- the pool
def test_an_extent_is_cached_with_its_block_in_the_tree_and_free_without():
    pool, known, private = pool_of(), block_of(0, in_tree=True), block_of(1)
    for block in (known, private):
        pool.take(block)
        pool.release(block)
    assert (len(pool.free), pool.num_cached, pool.num_active) == (3, 1, 0)
    assert known.extents != [NO_EXTENT] and private.extents == [NO_EXTENT]
    pool.acquire(known)
    assert (pool.num_cached, pool.num_active) == (0, 1)


def test_the_extent_longest_idle_is_taken_first_and_its_block_stays():
    pool, blocks = pool_of(2), [block_of(number, in_tree=True) for number in range(3)]
    for block in blocks[:2]:
        pool.take(block)
    for block in (blocks[1], blocks[0]):
        pool.release(block)
    pool.take(blocks[2])
    assert blocks[1].extents == [NO_EXTENT] and blocks[1].parent is not None
    assert blocks[0].extents != [NO_EXTENT] and pool.num_available == 1


def test_a_block_that_leaves_the_tree_gives_up_what_nobody_holds():
    pool, idle, held = pool_of(), block_of(0, in_tree=True), block_of(1, in_tree=True)
    for block in (idle, held):
        pool.take(block)
    pool.release(idle)
    for block in (idle, held):
        block.parent = None
        pool.forget(block)
    assert idle.extents == [NO_EXTENT] and held.extents != [NO_EXTENT]
    pool.release(held)
    assert len(pool.free) == 4


@pytest.mark.parametrize("has_its_own", [False, True])
def test_who_takes_a_doubles_place_takes_its_extent_unless_it_has_one(has_its_own: bool):
    pool, old, new = pool_of(), block_of(0, in_tree=True), block_of(1, in_tree=True)
    pool.take(old)
    pool.release(old)
    extent = pool.take(new) if has_its_own else old.extents[0]
    pool.inherit(old, new)
    assert new.extents == [extent] and old.extents == [NO_EXTENT]
    assert pool.num_available == (3 if has_its_own else 4)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
def test_the_first_block_seen_holds_the_first_visible_token(window: int):
    pool = pool_of(window=window)
    for position in range(40):
        visible = [j for j in range(position + 1) if position - window < j]
        assert pool.first(position) == visible[0] // SIZE


@pytest.mark.parametrize("num_tokens", range(33))
@pytest.mark.parametrize("missing", [(), (0,), (3,), (7,), (2, 5), (1, 2, 3), (6, 7), tuple(range(8))])
def test_the_longest_head_behind_which_a_row_sees_everything(num_tokens: int, missing: tuple[int, ...]):
    pool, blocks = pool_of(8, window=9), [block_of(number, in_tree=True) for number in range(8)]
    for block in blocks:
        if block.id not in missing:
            pool.take(block)

    def complete(length: int) -> bool:
        return all(j // SIZE not in missing for j in range(max(0, length - 8) // SIZE * SIZE, length))

    assert pool.longest(blocks, num_tokens) == max(n for n in range(num_tokens + 1) if complete(n))


# -------------------------------------------------------------------- sequences
def test_a_sequence_gives_up_what_no_row_to_come_can_see():
    harness = windowed(window=8, pages=40, prefix_caching=False)
    harness.add("r", prompt(30), greedy(20))
    pool, most = harness.kv.windows[0], 0
    while harness.core.has_work:
        harness.step()
        if "r" in harness.scheduler.requests:
            request = harness.scheduler.requests["r"]
            first_visible = max(0, request.num_confirmed - 7)
            assert pool.num_active == len(request.block_ids) - first_visible // SIZE
            most = max(most, pool.num_active) if request.num_confirmed > 30 else most
    assert most == 3 and pool.num_active == 0
    harness.assert_sequential("r")


def test_tables_name_nothing_outside_the_window():
    harness = windowed(window=8)
    harness.complete(prompt(30), ONE)
    harness.add("again", prompt(30), greedy(3))
    harness.step()
    [row] = last_plan(harness).new_rows
    whole, part = row.block_ids
    assert row.num_computed == 29 and len(whole) == len(part) == 8 and part[:5] == [0] * 5
    assert {group for group, _, _ in last_plan(harness).copies} == {0, 1}
    harness.run()
    harness.assert_sequential("again")


def test_extents_of_an_unfinished_step_come_back_when_it_ends():
    harness = windowed(depth=2, prefix_caching=False)
    harness.add("r", prompt(20), greedy(9))
    harness.step()
    pool = harness.kv.windows[0]
    held = pool.num_active
    harness.core.abort(["r"])
    assert pool.num_active == held > 0
    harness.run()
    assert pool.num_active == 0


def test_a_half_computed_prompt_goes_on_behind_what_others_computed():
    """It lets go of the extents that it now sees no more, and holds those of the blocks that it takes over."""
    harness = windowed(window=6, max_num_batched_tokens=8)
    harness.add("slow", prompt(60), greedy(3))
    harness.step()
    harness.step()
    harness.add("fast", prompt(60), greedy(3), priority=-1)
    harness.run()
    assert [e for e in harness.core.events(1000) if e["reason"] == "ahead"]
    for request_id in ("slow", "fast"):
        harness.assert_sequential(request_id)


# -------------------------------------------------------------------- matching
def crowd_out(harness: Harness, tokens: int) -> None:
    """Others come by whose extents take the place of idle ones; blocks there are enough."""
    harness.complete(prompt(tokens, 5000), ONE)
    assert harness.core.stats().evictions_total.get("allocation", 0) == 0


def test_a_prefix_is_reused_as_far_as_the_next_row_finds_all_it_sees():
    harness = windowed(window=8, pages=20, max_num_batched_tokens=8)
    harness.complete(prompt(40), ONE)
    crowd_out(harness, 80)  # all 20
    assert harness.complete([*prompt(40), 1], ONE).cached_tokens == 0
    assert lookups(harness)[-1] == ("miss", "window_evicted", 0)
    harness.assert_sequential("r2")
    assert harness.complete([*prompt(40), 2], ONE).cached_tokens == 40
    harness.assert_sequential("r3")


def test_a_hit_is_shortened_to_where_the_window_is_whole():
    harness = windowed(window=8, pages=20, max_num_batched_tokens=8)
    harness.complete(prompt(40), ONE)
    blocks = harness.kv.match_prefix(make_request(prompt(41))).blocks
    pool = harness.kv.windows[0]
    lost = blocks[6]
    pool._cached.move_to_end(lost.extents[0], last=False)
    crowd_out(harness, 44)  # one more than are free
    assert lost.extents == [NO_EXTENT]
    assert harness.complete([*prompt(32), 1], ONE).cached_tokens == 24
    assert lookups(harness)[-1] == ("hit", "window_evicted", 24)
    harness.assert_sequential("r2")


def test_what_is_behind_a_gap_is_found_again():
    """Blocks whose extents are gone still carry those behind them that have theirs."""
    harness = windowed(window=4, pages=12, max_num_batched_tokens=4)
    harness.complete(prompt(40), ONE)
    assert sum(block.extents == [NO_EXTENT] for block in harness.kv.pool.blocks if block.parent) == 0
    crowd_out(harness, 12)
    assert harness.complete([*prompt(40), 1], ONE).cached_tokens == 40
    harness.assert_sequential("r2")


# -------------------------------------------------------------------- room
def test_admission_counts_what_windows_will_hold():
    """Two prompts whose windows do not fit beside one another: the second waits though blocks are plenty."""
    harness = windowed(window=16, pages=9, max_num_batched_tokens=8)  # 8 at most by one sequence
    for number in range(2):
        harness.add(f"r{number}", prompt(60, 1000 * number), greedy(2))
    for _ in range(3):
        harness.step()
    assert len(harness.scheduler.running) == 1 and harness.kv.num_available > 30
    harness.run()
    assert not harness.core.stats().preemptions_total
    for number in range(2):
        harness.assert_sequential(f"r{number}")


def test_sharing_a_window_today_is_no_room_tomorrow():
    """Prompts with a common head share its extents, then part: each must be able to hold its own."""
    harness = windowed(window=16, pages=20, max_num_batched_tokens=8)
    harness.complete(prompt(40), ONE)
    for number in range(4):
        harness.add(f"r{number}x", [*prompt(40), *prompt(60, 1000 * (number + 1))], ONE)
    harness.run()
    assert not harness.core.stats().preemptions_total
    for number in range(4):
        harness.assert_sequential(f"r{number}x")


def test_what_is_shared_is_not_taken_for_its_own():
    """What a prompt under way has yet to take is all it may hold at once, but for what it holds alone."""
    harness = windowed(window=16, pages=40, max_num_batched_tokens=8)  # 8 at most by one sequence
    harness.complete(prompt(40), ONE)
    for number in range(2):  # the second is the more urgent: it finds what the first one holds
        harness.add(f"r{number}", [*prompt(40), *prompt(60, 1000 * number)], ONE, priority=-number)
        harness.step()
    one, two = (harness.scheduler.requests[f"r{number}"] for number in range(2))
    pool, blocks = harness.kv.windows[0], harness.kv.pool.blocks
    shared = [block_id for block_id in one.block_ids[one.window_starts[0] :] if block_id in two.block_ids]
    assert shared
    harness.kv.reserve(one)
    for request in (one, two):
        held = request.block_ids[request.window_starts[0] :]
        own = [block_id for block_id in held if pool._ref_counts[blocks[block_id].extents[0]] == 1]
        assert len(own) < len(held) and request.num_reserved[1] == pool.max_held - len(own)
    harness.run()
    assert not harness.core.stats().preemptions_total


def test_what_a_prompt_gives_up_is_kept_for_its_next_chunk():
    harness = windowed(window=16, pages=40, max_num_batched_tokens=8)
    harness.add("r", prompt(100), ONE)
    request, pool = harness.scheduler.requests["r"], harness.kv.windows[0]
    harness.step()
    while request.num_computed < 70:
        assert harness.kv.num_reserved[1] == request.num_reserved[1] == pool.max_held - pool.num_active
        harness.step()
    harness.run()
    assert harness.kv.num_reserved == [0, 0]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_steps_under_way_never_make_a_prompt_hold_more_than_it_was_promised(depth: int):
    harness = windowed(window=8, pages=60, max_num_batched_tokens=16, depth=depth, prefix_caching=False)
    harness.add("r", prompt(150), greedy(9))
    while harness.core.has_work:
        harness.step()
        assert harness.kv.windows[0].num_active <= harness.kv.windows[0].max_held
    harness.assert_sequential("r")


def test_a_preemption_frees_in_every_group():
    harness = windowed(window=16, pages=8, max_num_batched_tokens=8, prefix_caching=False)
    for number in range(3):
        harness.add(f"r{number}", prompt(3, 1000 * number), greedy(30))
    harness.run()
    assert harness.core.stats().preemptions_total["yielded_to_earlier"] > 0
    harness.assert_idle()
    for number in range(3):
        harness.assert_sequential(f"r{number}")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("window", [1, 5, 16])
def test_a04_the_fewest_extents_serve_a_context_of_any_length(window: int, budget: int, depth: int):
    few = WindowPages.plan(window, 1, SIZE, budget).max_held
    harness = windowed(window, few, depth=depth, max_num_batched_tokens=budget)
    assert harness.scheduler.window == 64 * SIZE
    for _ in range(2):
        harness.complete(prompt(150), greedy(50))
    harness.complete(prompt(150, 500), greedy(50))
    for request_id in harness.asked:
        harness.assert_sequential(request_id)
    assert not harness.core.stats().preemptions_total


def test_a04_fewer_bound_the_context():
    harness = windowed(window=16, pages=6, max_num_batched_tokens=64)
    assert harness.scheduler.window == 24
    harness.complete(prompt(10), greedy(None))
    harness.complete(prompt(23), ONE)
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


def test_memory_stats_take_the_fullest_group():
    harness = windowed(window=32, pages=8, num_blocks=100, max_num_batched_tokens=8)
    harness.add("r", prompt(20), greedy(9))
    for _ in range(3):
        harness.step()
    stats = harness.core.memory_stats()
    assert (stats["used_pages"], stats["utilization"], harness.core.stats().window_usage) == (5, 5 / 8, 5 / 8)


# -------------------------------------------------------------------- check
def lose_a_reference(kv: KVManager) -> None:
    kv.windows[0]._ref_counts[kv.windows[0].num_extents - 1 - len(kv.windows[0].free)] += 1


def give_up_too_much(kv: KVManager) -> None:
    request = next(iter(kv._tables.values()))
    kv.windows[0].release(kv.pool.blocks[request.block_ids[request.window_starts[0]]])
    request.window_starts[0] += 1


def keep_too_much(kv: KVManager) -> None:
    request = next(iter(kv._tables.values()))
    request.num_confirmed += SIZE


def orphan_an_extent(kv: KVManager) -> None:
    request = next(iter(kv._tables.values()))
    kv.pool.blocks[request.block_ids[-1]].extents[0] = NO_EXTENT


@pytest.mark.parametrize("damage", [lose_a_reference, give_up_too_much, keep_too_much, orphan_an_extent])
def test_check_finds(damage: Callable[[KVManager], None]):
    harness = windowed(window=8)
    harness.add("r", prompt(30), greedy(9))
    harness.step()
    damage(harness.kv)
    with pytest.raises(AssertionError):
        harness.kv.check()
