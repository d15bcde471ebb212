"""The host ahead of a device: random days of a whole engine whose device is as late as it may be, and the hazards of
that one by one. What each request gets is what it would get alone, with nothing late."""

import pytest
import static_kernels
import tiny_models
import torch
from engines import CPU, Engine, Loaded
from late_device import LateDevice
from random_days import GREEDY, NAN_TOKEN, PROMPT, WINDOW, Alone, Poisoned, ahead, collect, finish, live
from tiny_models import VARIANTS

from engine.messages import NewRow, StepPlan
from engine.runner.ahead import AheadExecutor, AheadHandle
from engine.runner.sampling.sampler import NON_FINITE
from engine.sampling_params import SamplingParams
from kernels import ops, reference


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with static_kernels.served():
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Loaded:
    plain = Loaded.load(tiny_models.build(tmp_path_factory.mktemp("tiny")), torch.float32, WINDOW)
    return Loaded(Poisoned(plain.model), plain.config, plain.dtype, plain.window)


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> Alone:
    return Alone(loaded)


MET = (
    "finished", "failed", "host_steps", "mixed_draws", "copies", "in_flight", "resumed", "late_ends", "hits",
    "aborted_in_flight", "preempted_in_flight", "preemptions", "replays", "logprobs", "prompt_logprobs",
)  # fmt: skip


def test_on_random_days_each_request_gets_what_it_would_get_alone(loaded: Loaded, alone: Alone) -> None:
    seen = live(loaded, alone, range(8))
    assert all(seen[name] for name in MET), seen


@pytest.mark.slow
def test_on_many_random_days(loaded: Loaded, alone: Alone) -> None:
    live(loaded, alone, range(1000, 1100))


# ------------------------------------------------------------------ hazards, one by one


@pytest.mark.parametrize("graphs", [False, True])
def test_forward_waits_for_nothing(loaded: Loaded, alone: Alone, graphs: bool) -> None:
    """The device does nothing at all between a launch and the next, not even what was sent."""
    engine = ahead(loaded, graphs=graphs)
    device, executor = engine.executor.link, engine.executor
    for length in (5, 9, 17):
        engine.add(PROMPT[:length], GREEDY)
    forward, launched = executor.forward, []

    def unwaiting(plan: StepPlan) -> AheadHandle:
        before = device.num_waiting
        handle = forward(plan)
        assert device.num_waiting > before
        launched.append(before)
        return handle

    executor.forward = unwaiting
    replays = device.num_replays
    answers = finish(engine, {})
    assert [answers[name].token_ids for name in sorted(answers)] == [
        alone.expected(PROMPT[:length]) for length in (5, 9, 17)
    ]
    assert sum(before > 0 for before in launched) > 4, "launched while the step before was still to be done"
    assert device.num_replays - replays == (5 if graphs else 0)


def test_a_step_that_only_the_device_draws_is_one_copy_and_one_launch(loaded: Loaded) -> None:
    engine = ahead(loaded)
    device = engine.executor.link
    engine.add(PROMPT[:9], SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.core.step()
    counts = device.num_sends, device.num_launches, device.num_replays
    for _ in range(4):  # positions 11 to 14: no page begins
        engine.core.step()
    assert (device.num_sends, device.num_launches, device.num_replays) == (counts[0] + 4, counts[1], counts[2] + 4)


def test_a05_a_resumed_request_keeps_its_last_token(loaded: Loaded, alone: Alone) -> None:
    """It is preempted while the token of its last row is in flight, and computes again with it."""
    for steps in (1, 2, 4):
        engine, answers = ahead(loaded, prefix_caching=False), {}
        [name] = engine.add(PROMPT, GREEDY)
        for _ in range(steps):
            collect(engine, answers)
        request = engine.core.scheduler.requests[name]
        assert request.num_in_flight == 1
        engine.core.scheduler._preempt(request, request)
        assert finish(engine, answers)[name].token_ids == alone.expected(PROMPT), steps


def test_a05_a_preempted_request_keeps_its_place(loaded: Loaded) -> None:
    """Preempted in flight it cannot come back at once; who came later does not take its place meanwhile."""
    engine, order = ahead(loaded, max_num_seqs=1), []
    first, second = (engine.add(PROMPT[:length], GREEDY)[0] for length in (9, 12))
    engine.core.step()
    engine.core.step()
    request = engine.core.scheduler.requests[first]
    assert request.num_in_flight
    engine.core.scheduler._preempt(request, request)
    while engine.core.has_work:
        order += [output.request_id for output in engine.core.step() if output.finish_reason]
    assert order == [first, second]


def test_a32_pages_are_not_given_away_while_a_step_in_flight_writes_them(loaded: Loaded, alone: Alone) -> None:
    """An aborted request still has a step to be done when the next prompt comes, which wants all pages there are."""
    engine, answers = ahead(loaded, num_blocks=9, prefix_caching=False), {}
    [name] = engine.add(PROMPT * 3, GREEDY)
    collect(engine, answers)
    written = set(engine.core.scheduler.requests[name].block_ids)
    engine.core.abort([name])
    [other] = engine.add(PROMPT[::-1] * 3, GREEDY)
    plans, forward = [], engine.executor.forward
    engine.executor.forward = lambda plan: plans.append(plan) or forward(plan)
    collect(engine, answers)
    assert not plans, "the only pages are still being written"
    assert finish(engine, answers)[other].token_ids == alone.expected(PROMPT[::-1] * 3)
    assert written & set(plans[0].new_rows[0].block_ids[0])


def test_the_token_after_the_end_is_computed_and_not_published(loaded: Loaded, alone: Alone) -> None:
    tokens = alone.expected(PROMPT)
    stop = next(place for place in range(2, 6) if tokens[place] not in tokens[:place])
    params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(tokens[stop],), ignore_eos=True)
    engine, plans = ahead(loaded), []
    forward = engine.executor.forward
    engine.executor.forward = lambda plan: plans.append(plan) or forward(plan)
    [name] = engine.add(PROMPT, params)
    answer = finish(engine, {})[name]
    assert (answer.token_ids, answer.finish_reason) == (tokens[: stop + 1], "stop")
    assert len(plans) == stop + 2, "one step too many was under way"


def test_a_slot_is_used_again_only_when_its_token_has_arrived(loaded: Loaded, alone: Alone) -> None:
    """One slot, and a request that ends, or is aborted, with a row under way: the next one's tokens are its own."""
    tokens = alone.expected(PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(tokens[1],), ignore_eos=True)
    for aborts in (False, True):
        engine, answers = ahead(loaded, max_num_seqs=1), {}
        [first] = engine.add(PROMPT, GREEDY if aborts else params)
        [second] = engine.add(PROMPT[4:], GREEDY)
        if aborts:
            for _ in range(3):
                collect(engine, answers)
            engine.core.abort([first])
        finish(engine, answers)
        assert answers[first].token_ids == tokens[:2] and answers[second].token_ids == alone.expected(PROMPT[4:])


def test_a_token_that_comes_for_another_sequence_is_noticed(loaded: Loaded) -> None:
    executor = ahead(loaded).executor
    handle = executor.forward(step_of([0], [3], new=[row_of(0, [1, 2, 3])]))
    executor.forward(step_of([0], [5], new=[row_of(0, [4, 5, 6, 7, 8])], freed=[0]))
    with pytest.raises(AssertionError, match="changed hands"):
        executor.sample(handle, None)


def test_masks_for_what_the_device_has_drawn_are_refused(loaded: Loaded) -> None:
    executor = ahead(loaded).executor
    handle = executor.forward(step_of([0], [3], new=[row_of(0, [1, 2, 3])]))
    with pytest.raises(ValueError, match="before its grammar masks"):
        executor.sample(handle, {0: [0] * 9})
    assert executor.sample(handle, None).rows[0].token_ids, "it is still there to be had"
    held = row_of(1, [1, 2, 3], SamplingParams(temperature=0.0, min_tokens=1))
    handle = executor.forward(step_of([0, 1], [1, 3], new=[held]))
    rows = executor.sample(handle, {1: [0, 1 << 5] + [0] * 7}).rows
    assert rows[1].token_ids == [37], "what the host draws can be masked"
    with pytest.raises(ValueError, match="before its grammar masks"):
        executor.sample(handle, {1: [0] * 9})


def test_a15_a_row_without_a_finite_maximum_fails_alone_and_late(loaded: Loaded, alone: Alone) -> None:
    """Its next row is under way by then; its token is read as 0 there, and nobody gets it."""
    engine, answers = ahead(loaded), {}
    [bad] = engine.add([*PROMPT, NAN_TOKEN], GREEDY)
    [good] = engine.add(PROMPT[:7], GREEDY)
    finish(engine, answers)
    assert (answers[bad].token_ids, answers[bad].finish_reason, answers[bad].error) == ([], "error", NON_FINITE)
    assert answers[good].token_ids == alone.expected(PROMPT[:7])
    [after] = engine.add([*PROMPT, 9], GREEDY)
    assert finish(engine, answers)[after].token_ids == alone.expected([*PROMPT, 9])


def test_a_step_that_breaks_late_ends_everything_and_gives_all_pages_back(loaded: Loaded) -> None:
    """The launch went well: the device says it when the step is waited for, with the next one launched already."""
    engine = ahead(loaded, graphs=False)
    engine.add(PROMPT, GREEDY)
    engine.core.step()
    loaded.model.breaks = True
    try:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.core.step()
    finally:
        loaded.model.breaks = False
    assert engine.executor.link.num_waiting, "the step after it was under way"
    assert not engine.core.has_work and engine.core.stats().pages_active == 0
    engine.core.check()


def test_late_rows_of_refused_parameters_and_tokens_fail_alone(loaded: Loaded, alone: Alone) -> None:
    engine, answers = ahead(loaded), {}
    [outside] = engine.add([1, 2, 100_000, 3], GREEDY)
    [biased] = engine.add([1, 2, 3], SamplingParams(temperature=0.0, logit_bias={260: 1.0}, max_tokens=4))
    [good] = engine.add(PROMPT, GREEDY)
    finish(engine, answers)
    assert "100000" in answers[outside].error and "logit_bias" in answers[biased].error
    assert answers[good].token_ids == alone.expected(PROMPT)


# ------------------------------------------------------------------ other ways through it
@pytest.mark.parametrize("name", ["gemma3", "mistral-window"])
def test_windows_with_graphs(name: str, tmp_path) -> None:
    """Two KV groups, or one with a window: tables of each live on the device."""
    plain = Loaded.load(tiny_models.build(tmp_path, VARIANTS[name]), torch.float32, WINDOW)
    prompts = [PROMPT * 2, PROMPT[:5], PROMPT[::-1]]
    engine = ahead(plain, LateDevice(3), num_blocks=40)
    found = engine.run(prompts, GREEDY)
    assert [one.token_ids for one in found] == [
        one.token_ids for one in Engine(plain, block_size=8).run(prompts, GREEDY)
    ]
    assert engine.executor.link.num_replays


def test_refreshes(tmp_path) -> None:
    """Launched one after another from the same staging; the other rows go on."""
    plain = Loaded.load(tiny_models.build(tmp_path), torch.float32, WINDOW)
    quantised = Loaded(
        plain.model, plain.config, plain.dtype, plain.window, kv={"kv_cache_dtype": "int8", "kv_refresh_interval": 3}
    )
    prompts, params = [PROMPT, PROMPT[:6], PROMPT[::-1]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:  # quantised pages need the reference, which nobody can capture
        patch.setattr(ops, "_serve", lambda op, *where: getattr(reference, op))
        expected = [one.token_ids for one in Engine(quantised, chunk=10).run(prompts, params)]
        engine = ahead(quantised, LateDevice(5), graphs=False, chunk=10, block_size=16)
        assert [one.token_ids for one in engine.run(prompts, params)] == expected
    assert engine.core.stats().refreshes_total >= 3 * 2


def test_warm_up_and_capture_leave_nothing_behind(loaded: Loaded) -> None:
    engine = ahead(loaded)
    executor = engine.executor
    executor.link.catch_up()
    assert isinstance(executor, AheadExecutor) and not executor.rows.lengths.any() and not executor.rows.faults
    assert executor.sampler.columns.on_device.all()
    executor.shutdown()
    executor.shutdown()
    assert executor.runner.pools[0].device == CPU


def step_of(slots: list[int], counts: list[int], new: list[NewRow], freed: list[int] | None = None) -> StepPlan:
    return StepPlan(
        step=1,
        slots=slots,
        num_tokens=counts,
        samples=[True] * len(slots),
        new_rows=new,
        new_blocks=[],
        copies=[],
        transfers=[],
        freed_slots=freed or [],
    )


def row_of(slot: int, token_ids: list[int], params: SamplingParams = GREEDY) -> NewRow:
    return NewRow(slot, f"r{slot}", token_ids, len(token_ids), params, 0, [[slot]], 0)
