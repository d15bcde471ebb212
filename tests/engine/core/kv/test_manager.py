"""Rules of the KV manager, one at a time. `play` does what scheduler and executor do with one request."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fakes import make_request, prompt

from engine.core.kv.block import RootKey
from engine.core.kv.manager import KVManager
from engine.core.kv.match import Match
from engine.request import Request

SIZE = 4


@pytest.fixture
def kv() -> KVManager:
    return KVManager(num_blocks=16, block_size=SIZE)


@contextmanager
def step(kv: KVManager, finish: bool = True) -> Iterator[int]:
    """One step; rows planned inside count themselves. Without `finish` it stays under way."""
    number = kv._step + 1
    kv.open_step(number)
    yield number
    if finish:
        kv.close_step(number)


def admit(kv: KVManager, request: Request, number: int, end: int | None = None) -> int:
    """Plans a request's first row up to `end`. Returns the tokens found."""
    match = kv.fitting_match(request)
    assert match is not None
    end = len(request.token_ids) if end is None else end
    kv.admit(request, match, end)
    plan(kv, request, end, number)
    return match.num_tokens


def plan(kv: KVManager, request: Request, end: int, number: int) -> None:
    kv.num_unfilled -= end - request.num_computed
    request.num_computed, request.last_step = end, number
    kv.publish(request, end, number)


def confirm(kv: KVManager, request: Request, number: int) -> None:
    request.num_confirmed = request.num_computed
    kv.publish(request, request.num_confirmed, number)
    kv.publish_tail(request, number)


def play(kv: KVManager, tokens: list[int], request_id: str = "r", free: bool = True, **fields: object) -> Request:
    """A request whose prompt is computed in one step of its own."""
    request = make_request(tokens, request_id, **fields)
    with step(kv) as number:
        request.cached_tokens = admit(kv, request, number)
        kv.seal_step(0)
    confirm(kv, request, number)
    if free:
        kv.free(request)
    kv.check()
    return request


def look(kv: KVManager, tokens: list[int]) -> Match:
    """What a newcomer of the next step would find."""
    kv.open_step(kv._step + 1)
    return kv.match_prefix(make_request(tokens))


# -------------------------------------------------------------------- matching
@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 5 * SIZE])
def test_a28_a_repeated_prompt_hits_all_but_its_last_token(kv: KVManager, length: int):
    assert play(kv, prompt(length), "cold").cached_tokens == 0
    for request_id in ("warm", "again"):
        assert play(kv, prompt(length), request_id).cached_tokens == length - 1


def test_a_longer_prompt_hits_the_whole_shorter_one(kv: KVManager):
    play(kv, prompt(6))
    assert play(kv, [*prompt(6), 1, 2, 3]).cached_tokens == 6


def test_a_diverging_prompt_hits_up_to_the_divergence(kv: KVManager):
    play(kv, prompt(12))
    tokens = prompt(12)
    tokens[6] = 0
    assert play(kv, tokens).cached_tokens == 6


def test_matching_changes_nothing(kv: KVManager):
    play(kv, prompt(10))
    order = [block.id for block in _lru(kv)]
    kv.fitting_match(make_request(prompt(10)))
    kv.num_reserved = [15]
    kv.fitting_match(make_request(prompt(10)))
    kv.num_reserved = [0]
    assert [block.id for block in _lru(kv)] == order
    kv.check()


def test_without_caching_nothing_is_kept_or_found():
    kv = KVManager(16, SIZE, enable_prefix_caching=False)
    for _ in range(2):
        assert play(kv, prompt(10)).cached_tokens == 0
    assert kv.pool.num_free == 16 and not kv.tree.roots


def test_a27_salts_and_adapters_do_not_meet(kv: KVManager):
    play(kv, prompt(10), salt="a")
    assert play(kv, prompt(10), salt="a").cached_tokens == 9
    assert play(kv, prompt(10), salt="b").cached_tokens == 0
    assert play(kv, prompt(10)).cached_tokens == 0
    play(kv, prompt(9, 500), adapter="lora1")
    assert play(kv, prompt(9, 500), salt="lora1").cached_tokens == 0
    assert play(kv, prompt(9, 500), adapter="lora2").cached_tokens == 0
    assert play(kv, prompt(9, 500), adapter="lora1").cached_tokens == 8


# -------------------------------------------------------------------- sharing and copying
def test_whole_blocks_are_shared_and_the_rest_is_copied(kv: KVManager):
    first = play(kv, prompt(10), "first", free=False)
    second = make_request(prompt(10), "second")
    with step(kv) as number:
        assert admit(kv, second, number) == 9
        copies = kv.seal_step(0)
    assert second.block_ids[:2] == first.block_ids[:2] and second.block_ids[2] != first.block_ids[2]
    assert copies == [(0, first.block_ids[2], second.block_ids[2])]
    assert kv.pool.num_shared == 2 and kv.copies_total == 1
    confirm(kv, second, number)
    kv.check()
    kv.free(first)
    kv.check()
    kv.free(second)
    kv.check()
    assert kv.pool.num_active == kv.pool.num_shared == kv.tokens_stored == 0


def test_followers_in_one_step_share_whole_blocks_but_copy_nothing(kv: KVManager):
    leader, follower = make_request(prompt(11), "leader"), make_request(prompt(11), "follower")
    with step(kv) as number:
        admit(kv, leader, number)
        assert admit(kv, follower, number) == 8  # two blocks; the third is only being written
        assert kv.seal_step(0) == []
    assert follower.block_ids[:2] == leader.block_ids[:2]
    kv.check()


def test_a_whole_block_of_this_step_is_no_source_of_a_copy(kv: KVManager):
    leader, follower = make_request(prompt(9), "leader"), make_request(prompt(8), "follower")
    with step(kv) as number:
        admit(kv, leader, number)
        assert admit(kv, follower, number) == 4
        assert kv.seal_step(0) == []
    with step(kv) as number:
        assert admit(kv, make_request(prompt(8), "later"), number) == 7
        assert len(kv.seal_step(0)) == 1


def test_a_copys_source_survives_the_step_that_copies_it():
    """With one page to spare it would be the first to be evicted for the copying request's own blocks."""
    kv = KVManager(num_blocks=5, block_size=SIZE)
    source = play(kv, prompt(3), "short")
    assert source.cached_tokens == 0
    request = make_request([*prompt(2), *prompt(10, 500)], "long")  # 3 blocks and one for generation
    with step(kv) as number:
        assert admit(kv, request, number) == 2
        ((_, copied, target),) = kv.seal_step(0)
    assert copied not in request.block_ids and target == request.block_ids[0]
    assert kv.evictions_total.total() == 0
    kv.check()


def test_the_copy_is_forgone_where_its_source_has_to_make_room():
    kv = KVManager(num_blocks=4, block_size=SIZE)
    play(kv, prompt(3), "short")
    request = make_request([*prompt(2), *prompt(10, 500)], "long")
    with step(kv) as number:
        assert admit(kv, request, number) == 0
        assert kv.seal_step(0) == []
        kv.try_allocate(request, 16)
    assert kv.evictions_total == {"allocation": 1}
    kv.check()


# -------------------------------------------------------------------- publication
def test_prompt_blocks_are_found_from_the_moment_they_are_planned(kv: KVManager):
    request = make_request(prompt(9))
    with step(kv, finish=False) as number:
        admit(kv, request, number)
        assert len(kv.match_prefix(make_request(prompt(9))).blocks) == 2
        kv.seal_step(0)


def test_generated_blocks_are_found_when_confirmed(kv: KVManager):
    request = play(kv, prompt(7), free=False)
    request.token_ids.append(1)
    with step(kv) as number:
        plan_without_publishing(kv, request, 8, number)
        kv.seal_step(0)
        assert len(kv.match_prefix(make_request([*prompt(7), 1, 2])).blocks) == 1
    confirm(kv, request, number)
    assert len(kv.match_prefix(make_request([*prompt(7), 1, 2])).blocks) == 2
    kv.check()


def plan_without_publishing(kv: KVManager, request: Request, end: int, number: int) -> None:
    assert kv.try_allocate(request, end) is not None
    kv.num_unfilled -= end - request.num_computed
    request.num_computed, request.last_step = end, number


def test_the_tail_of_a_running_prompt_can_be_copied(kv: KVManager):
    play(kv, prompt(7), "running", free=False)
    match = look(kv, prompt(7))
    assert (len(match.blocks), match.head, match.num_tokens) == (1, 2, 6)


def test_a_tail_that_a_sibling_already_holds_is_not_entered_twice(kv: KVManager):
    for number in range(3):
        play(kv, prompt(6), f"r{number}")
    assert kv.pool.num_cached == 2


def test_a_double_of_an_idle_block_takes_its_place_with_its_children(kv: KVManager):
    """The second request copies the second block, completes it, and goes on: nothing of what follows is lost."""
    play(kv, prompt(12), "first")
    second = play(kv, prompt(8), "second", free=False)
    assert second.cached_tokens == 7
    assert second.num_published == 2 and kv.evictions_total["duplicate"] == 1
    assert [block.id for block in look(kv, prompt(13)).blocks[:2]] == second.block_ids
    assert look(kv, prompt(13)).num_tokens == 12
    kv.check()


def test_a_double_of_a_block_in_use_stays_private_until_the_other_is_idle(kv: KVManager):
    first = play(kv, prompt(8), "first", free=False)
    second = play(kv, prompt(8), "second", free=False)
    assert (first.num_published, second.num_published) == (2, 1)
    assert kv.pool.blocks[second.block_ids[1]].parent is None
    second.token_ids += [1, 2, 3, 4]
    with step(kv) as number:
        plan_without_publishing(kv, second, 12, number)
        kv.seal_step(0)
    confirm(kv, second, number)
    assert second.num_published == 1
    kv.check()
    kv.free(first)
    kv.free(second)  # now the first one's block is idle
    kv.check()
    assert look(kv, [*prompt(8), 1, 2, 3, 4, 5]).num_tokens == 12


# -------------------------------------------------------------------- release and eviction
def test_running_out_returns_none_and_changes_nothing(kv: KVManager):
    request = play(kv, prompt(8), free=False)
    before = list(request.block_ids), kv.num_available, kv.num_unfilled
    assert kv.try_allocate(request, 17 * SIZE) is None
    assert (list(request.block_ids), kv.num_available, kv.num_unfilled) == before
    assert kv.try_allocate(request, 8) == []
    kv.check()


def test_eviction_takes_the_longest_idle_tail_first(kv: KVManager):
    play(kv, prompt(16), "old")
    play(kv, prompt(16, 500), "new")
    hungry = play(kv, prompt(40, 900), "hungry", free=False)
    assert len(hungry.block_ids) == 10  # 8 were free
    assert look(kv, prompt(16)).num_tokens == 8
    assert look(kv, prompt(16, 500)).num_tokens == 15
    assert kv.evictions_total == {"allocation": 2}


def test_blocks_in_use_are_never_evicted(kv: KVManager):
    held = play(kv, prompt(40), "held", free=False)
    request = make_request(prompt(40, 500), "big")
    assert kv.fitting_match(request) is None
    assert all(kv.pool.blocks[block].ref_count == 1 for block in held.block_ids)


def test_blocks_of_an_unfinished_step_come_back_when_it_ends(kv: KVManager):
    request = make_request(prompt(10))
    with step(kv, finish=False) as number:
        admit(kv, request, number)
        kv.seal_step(0)
    kv.free(request)
    kv.check()
    assert kv.num_available == 13 and kv.awaits_release(request)
    kv.close_step(number)
    kv.check()
    assert kv.num_available == 16 and not kv.awaits_release(request)


def test_a_failed_request_leaves_nothing_of_its_own_behind(kv: KVManager):
    play(kv, prompt(8), "good")
    bad = play(kv, [*prompt(8), *prompt(9, 500)], "bad", free=False)
    other = play(kv, [*prompt(8), 1], "other", free=False)
    kv.free(bad, keep=False)
    kv.check()
    assert look(kv, [*prompt(8), *prompt(9, 500)]).num_tokens == 8
    kv.free(other)
    assert look(kv, [*prompt(8), 1, 2]).num_tokens == 9


def test_a_failed_step_is_withdrawn_with_everything_built_on_it(kv: KVManager):
    play(kv, prompt(6), "good")
    requests = [make_request(prompt(13), "leader"), make_request(prompt(12), "follower")]
    for request in requests:  # two steps under way
        with step(kv, finish=False) as number:
            admit(kv, request, number)
            kv.seal_step(0)
    for request in requests:
        kv.free(request)
    assert look(kv, prompt(13)).num_tokens == 12
    kv.fail_steps()
    kv.check()
    assert kv.pool.num_active == 0
    assert look(kv, prompt(13)).num_tokens == 6


# -------------------------------------------------------------------- catching up
def half_computed(kv: KVManager, request_id: str, length: int, end: int) -> Request:
    request = make_request(prompt(length), request_id)
    with step(kv) as number:
        admit(kv, request, number, end)
        kv.seal_step(0)
    request.num_confirmed = request.num_computed
    return request


@pytest.mark.parametrize("begun", [4, 6])
def test_a_half_computed_prompt_takes_over_what_others_computed_since(kv: KVManager, begun: int):
    slow = half_computed(kv, "slow", 14, begun)
    fast = play(kv, prompt(14), "fast", free=False)
    assert kv.extend_match(slow)
    assert slow.block_ids == fast.block_ids[:3]
    assert slow.num_computed == slow.num_confirmed == 12 and slow.num_published == 3
    kv.check()
    assert not kv.extend_match(slow)


def test_nothing_is_taken_over_while_a_step_is_under_way(kv: KVManager):
    slow = make_request(prompt(14), "slow")
    with step(kv, finish=False) as number:
        admit(kv, slow, number, 6)
        kv.seal_step(0)
    fast = make_request(prompt(14), "fast")
    with step(kv, finish=False) as number:
        admit(kv, fast, number)
        kv.seal_step(0)
    assert not kv.extend_match(slow)


# -------------------------------------------------------------------- numbers
def test_footprint_is_all_tokens_and_a_page_but_never_more_than_can_be_filled(kv: KVManager):
    from engine.sampling_params import SamplingParams

    assert kv.footprint(make_request(prompt(8))) == 3
    assert kv.footprint(make_request(prompt(9))) == 4
    assert kv.footprint(make_request(prompt(8), params=SamplingParams(max_tokens=1))) == 2
    assert kv.footprint(make_request(prompt(8), params=SamplingParams(max_tokens=2))) == 3


def test_tokens_stored_counts_shared_slots_once(kv: KVManager):
    play(kv, prompt(10), "one", free=False)
    assert kv.tokens_stored == 10
    play(kv, prompt(10), "two", free=False)
    assert kv.tokens_stored == 12  # 8 shared, 2 in each tail


# -------------------------------------------------------------------- check
def test_check_finds_a_lost_reference(kv: KVManager):
    request = play(kv, prompt(10), free=False)
    kv.pool.blocks[request.block_ids[0]].ref_count += 1
    with pytest.raises(AssertionError):
        kv.check()


def test_check_finds_a_shared_block_that_would_be_written(kv: KVManager):
    one, two = play(kv, prompt(3), "one", free=False), play(kv, prompt(3, 500), "two", free=False)
    kv.pool.release(kv.pool.blocks[two.block_ids[0]])
    two.block_ids[0] = one.block_ids[0]
    kv.pool.acquire(kv.pool.blocks[one.block_ids[0]])
    with pytest.raises(AssertionError):
        kv.check()


def test_check_finds_a_tree_that_lies(kv: KVManager):
    request = play(kv, prompt(10), free=False)
    request.token_ids[1] = 0
    with pytest.raises(AssertionError):
        kv.check()


def test_check_finds_a_wrong_number_of_unfilled_slots(kv: KVManager):
    play(kv, prompt(10), free=False)
    kv.num_unfilled += 1
    with pytest.raises(AssertionError):
        kv.check()


def test_check_finds_a_node_that_hangs_nowhere(kv: KVManager):
    request = play(kv, prompt(10), free=False)
    del kv.tree.roots[RootKey(None, None)]
    with pytest.raises(AssertionError):
        kv.check()
    assert request.block_ids


def _lru(kv: KVManager) -> list:
    blocks, block = [], kv.pool.oldest
    while block is not None and block.id >= 0:
        blocks.append(block)
        block = block.newer
    return blocks
