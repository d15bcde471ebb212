"""The executor on a tiny Llama with plans made by hand: chunks, company, shared and copied blocks, preemption, late
results, faults. Logits are compared bit for bit, and with transformers for their values.

Linear layers compute row by row here, so that these tests hold on every CPU: whether the fast ones are exact in any
company is for their own tests to say.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import tiny_models
import torch
from packed import by_row

from configs.kv import KVFormat, KVLayout
from configs.limits import SchedulerLimits
from configs.supported import read_model
from engine.messages import NewRow, RowResult, StepPlan, TokenLogprobs
from engine.model.registry import load_model
from engine.runner.executor import SingleExecutor, StepHandle
from engine.runner.model_runner import ModelRunner
from engine.runner.warm_up import warm_up
from engine.sampling_params import SamplingParams
from kernels import ops

pytestmark = pytest.mark.filterwarnings("ignore:no native kernels:RuntimeWarning")  # torch code serves as well

NUM_SLOTS, NUM_BLOCKS, WINDOW = 6, 96, 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
DTYPES = {torch.float32: KVFormat.FP32, torch.bfloat16: KVFormat.BF16}
PROMPT, *OTHERS = (random.Random(length).choices(range(256), k=length) for length in (45, 21, 30, 39, 48))


@dataclass
class Sequence:
    token_ids: list[int]
    params: SamplingParams = GREEDY
    name: str = "s"
    num_prompt: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int = -1
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    def __post_init__(self):
        self.num_prompt = len(self.token_ids)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


class Driver:
    """A scheduler by hand: says who enters, computes how much and leaves; hands out blocks in a shuffled order."""

    def __init__(self, executor: SingleExecutor, seed: int = 0) -> None:
        self.executor = executor
        self.block_size = executor.rows.block_size
        self.free = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(self.free)
        self.running: dict[int, Sequence] = {}
        self.new: list[NewRow] = []
        self.freed: list[int] = []
        self.copies: list[tuple[int, int, int]] = []
        self.steps = 0

    def enter(self, sequence: Sequence, slot: int, computed: int = 0, blocks: tuple[int, ...] = ()) -> None:
        sequence.slot, sequence.computed, sequence.blocks = slot, computed, list(blocks)
        self.running[slot] = sequence
        self.new.append(
            NewRow(
                slot=slot,
                request_id=sequence.name,
                token_ids=list(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt,
                params=sequence.params,
                index=0,
                block_ids=[list(blocks)],
                num_computed=computed,
            )
        )

    def leave(self, sequence: Sequence, keep_blocks: bool = False) -> None:
        del self.running[sequence.slot]
        self.freed.append(sequence.slot)
        if not keep_blocks:
            self.free = sequence.blocks + self.free
        sequence.slot, sequence.blocks, sequence.computed = -1, [], 0

    def copy_of(self, block: int) -> int:
        self.copies.append((0, block, self.free.pop()))
        return self.copies[-1][2]

    def plan(self, counts: dict[int, int], in_flight: int = 0) -> StepPlan:
        """counts: slot -> tokens; `in_flight`: tokens each sequence will still get from an unfinished step."""
        slots = sorted(counts, key=lambda slot: counts[slot] != 1)
        new_blocks, samples = [], []
        for slot in slots:
            sequence = self.running[slot]
            sequence.computed += counts[slot]
            missing = -(-sequence.computed // self.block_size) - len(sequence.blocks)
            if missing > 0:
                added = [self.free.pop() for _ in range(missing)]
                sequence.blocks += added
                new_blocks.append((slot, [added]))
            samples.append(sequence.computed == len(sequence.token_ids) + in_flight)
        plan = StepPlan(
            step=self.steps,
            slots=slots,
            num_tokens=[counts[slot] for slot in slots],
            samples=samples,
            new_rows=self.new,
            new_blocks=new_blocks,
            copies=self.copies,
            transfers=[],
            freed_slots=self.freed,
        )
        self.steps += 1
        self.new, self.freed, self.copies = [], [], []
        return plan

    def step(self, counts: dict[int, int]) -> list[RowResult]:
        handle = self.executor.forward(self.plan(counts))
        logits = None if handle.logits is None else handle.logits.clone()
        return self.take(handle, logits)

    def take(self, handle: StepHandle, logits: torch.Tensor | None = None, masks=None) -> list[RowResult]:
        result = self.executor.sample(handle, masks)
        assert result.step == handle.step
        for place, row in enumerate(result.rows):
            sequence = self.running[row.slot]
            sequence.token_ids += row.token_ids
            sequence.error = row.error
            sequence.logprobs += row.logprobs or []
            if logits is not None:
                sequence.logits.append(logits[place])
        return result.rows

    def run(self, chunk: int, num_output: int, *, only: list[int] | None = None) -> None:
        """Steps until every sequence has `num_output` tokens, each in chunks of at most `chunk` tokens."""
        while True:
            counts = {
                slot: min(chunk, len(sequence.token_ids) - sequence.computed)
                for slot, sequence in self.running.items()
                if len(sequence.output) < num_output and sequence.error is None and (only is None or slot in only)
            }
            if not counts:
                return
            self.step(counts)


@pytest.fixture(scope="module", autouse=True)
def linear_row_by_row():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "linear", by_row)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def models(folder):
    config = read_model(folder)
    return config, {dtype: load_model(folder, config, dtype, WINDOW, lambda _: None) for dtype in DTYPES}


@pytest.fixture
def make(models):
    config, by_dtype = models

    def build(dtype=torch.float32, block_size=16, model=None, **driver) -> Driver:
        layout = KVLayout.of(config.kv_layers(DTYPES[dtype]), block_size)
        limits = SchedulerLimits(NUM_SLOTS, 160, WINDOW)
        runner = ModelRunner(model or by_dtype[dtype], config, layout, [NUM_BLOCKS], limits)
        return Driver(SingleExecutor(runner, (tiny_models.EOS,)), **driver)

    return build


def solo(driver: Driver, prompt=PROMPT, chunk: int = WINDOW, num_output: int = 12, params=GREEDY, slot=0) -> Sequence:
    sequence = Sequence(list(prompt), params)
    driver.enter(sequence, slot)
    driver.run(chunk, num_output)
    return sequence


def same(one: Sequence, other: Sequence) -> bool:
    return one.token_ids == other.token_ids and torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunks_and_block_sizes_change_no_bit(make, dtype, block_size):
    reference = solo(make(dtype))
    for chunk in (1, 3, 16):
        assert same(solo(make(dtype, block_size), chunk=chunk), reference), chunk


def test_values_are_those_of_transformers(make, folder):
    sequence = solo(make(), chunk=16)
    with torch.no_grad():
        expected = tiny_models.load_reference(folder)(torch.tensor([sequence.token_ids])).logits[0]
    found = torch.stack(sequence.logits)
    torch.testing.assert_close(found, expected[len(PROMPT) - 1 : -1], rtol=1e-4, atol=1e-4)
    assert sequence.output == expected[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a40_company_changes_no_bit(make, dtype):
    reference = solo(make(dtype))
    driver = make(dtype, seed=5)
    sequence = Sequence(list(PROMPT))
    for slot, prompt in enumerate(OTHERS[:2]):
        driver.enter(Sequence(list(prompt), SamplingParams(seed=slot)), slot)
    driver.run(7, 2)
    driver.enter(sequence, 4)
    for slot, prompt in enumerate(OTHERS[2:], start=2):
        driver.enter(Sequence(list(prompt)), slot)
    driver.run(7, 12)
    assert same(sequence, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_and_copied_blocks_change_no_bit(make, dtype):
    """A second sequence takes whole blocks of the first and a copy of the partly matching one."""
    fork = [*PROMPT[:41], 7, 7, 8]
    reference = solo(make(dtype), fork)
    driver = make(dtype)
    first = Sequence(list(PROMPT))
    driver.enter(first, 3)
    driver.run(WINDOW, 4)
    second = Sequence(list(fork))
    driver.enter(second, 1, computed=41, blocks=(*first.blocks[:2], driver.copy_of(first.blocks[2])))
    driver.run(WINDOW, 12)
    assert same(second, reference)
    assert same(first, solo(make(dtype)))


def test_a_copy_is_made_before_anything_of_the_step_is_written(make):
    """The source is overwritten by its owner in the very step of the copy; the copy has what was there before."""
    fork = [*PROMPT[:33], 9]
    reference = solo(make(), fork)
    driver = make()
    first = Sequence(list(PROMPT))
    driver.enter(first, 0)
    driver.run(WINDOW, 1)
    source = first.blocks[2]
    driver.leave(first, keep_blocks=True)
    driver.free.remove(driver.free[0])
    overwriting, second = Sequence(list(OTHERS[0])), Sequence(list(fork))
    driver.enter(overwriting, 0, blocks=(source, driver.free.pop()))
    driver.enter(second, 1, computed=33, blocks=(driver.free.pop(), driver.free.pop(), driver.copy_of(source)))
    # The first two blocks of the fork are computed anew elsewhere, so copy them as well from the first sequence.
    first_two = driver.executor.rows.block_tables[0, 0, :2].tolist()
    driver.copies += [(0, source, copy) for source, copy in zip(first_two, second.blocks[:2], strict=True)]
    driver.step({0: len(overwriting.token_ids), 1: 1})
    driver.run(WINDOW, 12)
    assert same(second, reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a05_preempted_and_resumed_in_another_slot(make, dtype):
    params = SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.4, logprobs=2, max_tokens=None)
    reference = solo(make(dtype), params=params)
    unseeded = SamplingParams(temperature=2.0, max_tokens=None)
    driver = make(dtype)
    sequence, company = Sequence(list(PROMPT), params), Sequence(list(OTHERS[1]), unseeded, "other")
    driver.enter(sequence, 0)
    driver.enter(company, 1)
    driver.run(16, 5)
    driver.leave(sequence)
    driver.enter(Sequence(list(OTHERS[2])), 0)  # takes the slot, and the blocks, in the step that frees them
    driver.run(16, 7)
    driver.enter(sequence, 5)
    driver.run(16, 12)
    assert same(sequence, reference) and sequence.logprobs == reference.logprobs


def test_stale_memory_changes_no_bit(make):
    """Whatever a block held before, NaN too, is never seen."""
    reference = solo(make())
    driver = make()
    driver.executor.runner.pools[0].fill_(255)  # every number a NaN
    assert same(solo(driver, chunk=3), reference)


def test_late_results_change_no_token(make):
    """The next step's `forward` before this step's `sample`: inputs come from the runner's own rows."""
    params = SamplingParams(temperature=0.8, seed=5, presence_penalty=0.5, max_tokens=None)
    references = [solo(make(), prompt, params=params) for prompt in (PROMPT, OTHERS[3])]
    driver = make()
    sequences = [Sequence(list(PROMPT), params), Sequence(list(OTHERS[3]), params)]
    for slot, sequence in enumerate(sequences):
        driver.enter(sequence, slot)
    pending = driver.executor.forward(driver.plan({slot: len(s.token_ids) for slot, s in enumerate(sequences)}))
    for _ in range(11):
        following = driver.executor.forward(driver.plan({0: 1, 1: 1}, in_flight=1))
        driver.take(pending)
        pending = following
    driver.take(pending)
    assert [sequence.token_ids for sequence in sequences] == [reference.token_ids for reference in references]
    assert driver.executor.sample(pending, None) is pending.result


def test_masks_that_come_after_the_draw_are_refused(make):
    driver = make()
    driver.enter(Sequence(list(PROMPT)), 0)
    handle = driver.executor.forward(driver.plan({0: len(PROMPT)}))
    driver.executor.forward(driver.plan({0: 1}, in_flight=1))
    with pytest.raises(ValueError, match="before its grammar masks"):
        driver.executor.sample(handle, {0: [0] * 9})


def test_masks_choose_the_token(make):
    driver = make()
    driver.enter(sequence := Sequence(list(PROMPT)), 0)
    handle = driver.executor.forward(driver.plan({0: len(PROMPT)}))
    driver.take(handle, masks={0: [0, 1 << 5] + [0] * 7})
    assert sequence.output == [37]


def test_a_step_without_sampling_rows_and_one_without_any(make):
    driver = make()
    driver.enter(sequence := Sequence(list(PROMPT)), 2)
    assert driver.step({2: 10}) == [] and driver.executor.rows.num_computed[2] == 10
    assert driver.step({}) == []
    driver.run(WINDOW, 12)
    assert sequence.token_ids == solo(make()).token_ids
    driver.leave(sequence)
    assert driver.step({}) == [] and driver.executor.rows.lengths[2] == 0


def test_results_come_in_the_order_of_the_sampling_rows(make):
    driver = make()
    for slot, prompt in ((4, PROMPT), (1, OTHERS[0]), (3, OTHERS[1])):
        driver.enter(Sequence(list(prompt)), slot)
    driver.step({4: len(PROMPT), 1: 2, 3: len(OTHERS[1])})
    plan = driver.plan({4: 1, 1: 1, 3: 1})
    assert not plan.samples[plan.slots.index(1)] or len(OTHERS[0]) == 3
    rows = driver.executor.sample(driver.executor.forward(plan), None).rows
    assert [row.slot for row in rows] == [
        slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples
    ]


# ------------------------------------------------------------------ faults
class Poisoned(torch.nn.Module):
    """A model whose logits are NaN for sequences that end in a given token, and that raises when told to."""

    def __init__(self, model, token):
        super().__init__()
        self.model, self.token, self.broken = model, token, False

    def hidden(self, batch, attention):
        if self.broken:
            raise RuntimeError("broken")
        hidden = self.model.hidden(batch, attention)
        hidden[batch.input_ids[batch.logit_rows] == self.token] = float("nan")
        return hidden

    def logits(self, hidden):
        return self.model.logits(hidden)


def test_a15_non_finite_logits_end_their_sequence_only(make, models):
    driver = make(model=Poisoned(models[1][torch.float32], token=256))
    good, bad = Sequence(list(PROMPT)), Sequence([*OTHERS[0], 256])
    driver.enter(good, 0)
    driver.enter(bad, 1)
    driver.run(16, 3)
    assert bad.error is not None and "not finite" in bad.error and bad.output == []
    driver.leave(bad)
    after = Sequence(list(OTHERS[0]))
    driver.enter(after, 1)
    driver.run(16, 12)
    assert same(good, solo(make())) and same(after, solo(make(), OTHERS[0]))


def test_a08_rows_that_cannot_be_served_fail_alone(make):
    driver = make()
    good = Sequence(list(PROMPT))
    outside = Sequence([1, 2, 100_000, 3])
    biased = Sequence([1, 2, 3], SamplingParams(logit_bias={260: 1.0}))
    for slot, sequence in enumerate((outside, good, biased)):
        driver.enter(sequence, slot)
    driver.run(3, 12)
    assert "100000" in (outside.error or "") and "logit_bias" in (biased.error or "")
    assert outside.output == biased.output == [] and same(good, solo(make()))


def test_a_failed_sequence_keeps_failing_until_its_slot_is_freed(make, models):
    """With late results the next plan still has the row."""
    driver = make(model=Poisoned(models[1][torch.float32], token=256))
    driver.enter(Sequence([3, 256]), 0)
    first = driver.executor.forward(driver.plan({0: 2}))
    second = driver.executor.forward(driver.plan({0: 1}, in_flight=1))
    for handle in (first, second):
        assert [(row.token_ids, bool(row.error)) for row in driver.executor.sample(handle, None).rows] == [([], True)]


def test_a_step_that_breaks_has_computed_nothing(make, models):
    model = Poisoned(models[1][torch.float32], token=-1)
    driver = make(model=model)
    driver.enter(sequence := Sequence(list(PROMPT)), 0)
    driver.run(16, 3)
    model.broken = True
    plan = driver.plan({0: 1})
    with pytest.raises(RuntimeError, match="broken"):
        driver.executor.forward(plan)
    model.broken = False
    handle = driver.executor.forward(plan)
    logits = handle.logits.clone()
    driver.take(handle, logits)
    driver.run(16, 12)
    assert same(sequence, solo(make()))


# ------------------------------------------------------------------ start and end
@pytest.mark.parametrize("block_size", [8, 32])
def test_warm_up_leaves_nothing_behind(make, block_size):
    driver = make(block_size=block_size)
    executor = driver.executor
    warm_up(executor)
    assert not executor.runner.pools[0].any() and not executor.rows.lengths.any() and not executor.rows.faults
    assert executor.sampler.columns.plain.all()
    assert same(solo(driver), solo(make()))


@pytest.mark.parametrize("window", [2, 3, 4])
def test_warm_up_fits_a_pool_of_one_block(models, window):
    config, by_dtype = models
    layout = KVLayout.of(config.kv_layers(KVFormat.FP32), 4)
    runner = ModelRunner(by_dtype[torch.float32], config, layout, [1], SchedulerLimits(8, 4, window))
    executor = SingleExecutor(runner, ())
    warm_up(executor)
    assert not executor.runner.pools[0].any()


def test_shutdown_is_safe_twice(make):
    executor = make().executor
    executor.shutdown()
    executor.shutdown()


def test_sampled_log_probabilities_do_not_see_company(make):
    params = SamplingParams(temperature=1.0, seed=11, logprobs=3, max_tokens=None)
    reference = solo(make(), params=params)
    driver = make(seed=2)
    sequence = Sequence(list(PROMPT), params)
    driver.enter(sequence, 5)
    for slot, prompt in enumerate(OTHERS):
        driver.enter(Sequence(list(prompt), params), slot)
    driver.run(16, 12)
    assert sequence.logprobs == reference.logprobs and len(sequence.logprobs) == 12
    found = np.array([each.logprob for each in sequence.logprobs])
    logits = torch.stack(sequence.logits)
    expected = torch.log_softmax(logits, dim=-1)[range(12), sequence.output]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
