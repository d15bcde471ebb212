"""The fake can tell: every way of reading the wrong page changes its answer or trips an assertion."""

import pytest
from fakes import EMPTY, Harness, HashExecutor, cell_after, sequential

from engine.messages import NewRow, StepPlan
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def first_plan(step: int = 1, slot: int = 0, blocks: tuple[int, ...] = (0, 1), computed: int = 0, **fields) -> StepPlan:
    row = NewRow(slot, f"r{slot}", list(PROMPT), len(PROMPT), GREEDY, 0, [list(blocks)], computed)
    plan = {
        "slots": [slot],
        "num_tokens": [len(PROMPT) - computed],
        "samples": [True],
        "new_rows": [row],
        "new_blocks": [],
        "copies": [],
        "transfers": [],
        "freed_slots": [],
    }
    return StepPlan(step=step, **(plan | fields))


@pytest.fixture
def executor() -> HashExecutor:
    return HashExecutor(num_blocks=6, block_size=4, max_num_seqs=4)


def run(executor: HashExecutor, plan: StepPlan) -> int:
    return executor.sample(executor.forward(plan), None).rows[0].token_ids[0]


def test_sequential_is_what_the_executor_draws(executor: HashExecutor):
    expected, _ = sequential(PROMPT, GREEDY, 0, 1000)
    assert run(executor, first_plan()) == expected[0]
    assert run(executor, first_plan(2, 1, (0, 4), computed=4)) == expected[0]  # the first block shared
    for cell, token in zip(executor.cells[0], PROMPT, strict=False):
        assert cell[0] == token
    assert executor.cells[0][0] == cell_after(EMPTY, PROMPT[0])


@pytest.mark.parametrize("blocks", [(5, 4), (1, 4)], ids=["never written", "another one"])
def test_a_wrong_page_changes_the_answer(executor: HashExecutor, blocks: tuple[int, int]):
    expected = run(executor, first_plan())
    assert run(executor, first_plan(2, 1, blocks, computed=4)) != expected


def test_a_page_that_was_not_copied_changes_the_answer(executor: HashExecutor):
    expected = run(executor, first_plan())
    assert run(executor, first_plan(2, 1, (0, 4), computed=6, copies=[(0, 1, 4)])) == expected
    assert run(executor, first_plan(3, 2, (0, 5), computed=6)) != expected


@pytest.mark.parametrize(
    "change",
    [
        {"copies": [(0, 1, 2), (0, 2, 3)]},
        {"copies": [(0, 1, 2), (0, 0, 2)]},
        {"samples": [False]},
        {"num_tokens": [9]},
        {"slots": []},
        {"blocks": (0,)},
    ],
)
def test_a_broken_promise_of_the_plan_is_noticed(executor: HashExecutor, change: dict):
    with pytest.raises(AssertionError):
        executor.forward(first_plan(**change))


def test_two_rows_that_write_one_block_are_noticed(executor: HashExecutor):
    run(executor, first_plan())
    with pytest.raises(AssertionError):
        both = first_plan(2, 1, (0, 2), computed=4)
        both.new_rows.append(NewRow(2, "r2", list(PROMPT), len(PROMPT), GREEDY, 0, [[0, 2]], 4))
        both.slots, both.num_tokens, both.samples = [1, 2], [4, 4], [True, True]
        executor.forward(both)


def test_a_block_that_an_unfinished_step_writes_must_not_be_reused(executor: HashExecutor):
    executor.forward(first_plan())
    with pytest.raises(AssertionError, match="still wrote"):
        executor.forward(first_plan(2, 1, (1, 2)))


def test_the_harness_notices_an_answer_that_is_not_the_sequential_one():
    harness = Harness()
    harness.complete(PROMPT, GREEDY)
    harness.assert_sequential("r0")
    harness.results["r0"].token_ids[3] += 1
    with pytest.raises(AssertionError):
        harness.assert_sequential("r0")
