"""The handed cases, as far as the core alone can show them; the numbers are those of the cases' list."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import Harness, greedy, prompt, sequential

from engine.errors import ContextLengthExceeded
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]


# -------------------------------------------------------------------- A04
def test_a04_prompt_bigger_than_the_pool():
    harness = Harness(num_blocks=16, block_size=4, max_model_len=4096)
    with pytest.raises(ContextLengthExceeded):
        harness.add("big", prompt(100))
    harness.add("small", prompt(8), greedy(4))
    harness.run(max_steps=10)
    harness.assert_sequential("small")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_a04_the_exact_edge(depth: int, caching: bool, budget: int):
    harness = Harness(16, 4, max_model_len=4096, depth=depth, prefix_caching=caching, max_num_batched_tokens=budget)
    usable = harness.kv.usable_tokens
    assert usable == 64
    for _ in range(3):  # the second and third time the pool is full of the same tokens
        result = harness.complete(prompt(usable - 1), greedy(1))
        assert (len(result.token_ids), result.finish_reason) == (1, "length")
    harness.complete(prompt(usable - 1, 500), greedy(1))  # ... and of others
    with pytest.raises(ContextLengthExceeded):
        harness.add("one too many", prompt(usable), greedy(1))
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 30, 62])
def test_a04_whoever_fits_alone_finishes_alone(depth: int, length: int):
    harness = Harness(16, 4, depth=depth)
    for _ in range(2):
        result = harness.complete(prompt(length), greedy(None))
        assert length + len(result.token_ids) == 64
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


# -------------------------------------------------------------------- A05
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_a05_preemption_is_invisible(depth: int, caching: bool):
    harness = Harness(num_blocks=40, block_size=4, depth=depth, prefix_caching=caching)
    for number in range(8):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=40, ignore_eos=True, logprobs=0)
            harness.add(f"r{number}-{temperature}", prompt(10 + number, 100 * number), params)
    harness.run()
    stats = harness.core.stats()
    assert sum(stats.preemptions_total.values()) > 0 and stats.recomputed_tokens_total > 0
    for request_id, result in harness.results.items():
        harness.assert_sequential(request_id)
        assert [logprob.logprob for logprob in result.logprobs] == [-token for token in result.token_ids]
    assert stats.generated_tokens_total == sum(len(result.token_ids) for result in harness.results.values())
    prompts = sum(len(request.prompt_token_ids) for request in harness.asked.values())
    assert stats.prefill_tokens_total + stats.prefix_hits_total == prompts
    harness.assert_idle()


# -------------------------------------------------------------------- A06
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "tokens"), [(60, 20), (10, 70), (30, 40)])
def test_a06_no_thrash(depth: int, caching: bool, length: int, tokens: int):
    """Each alone fits, a few together do not in the end. Every window of steps brings somebody a token."""
    harness = Harness(24, 4, max_num_batched_tokens=16, prefix_caching=caching, depth=depth)
    for number in range(6):
        harness.add(f"r{number}", prompt(length, 1000 * number), greedy(tokens))
    ideal = -(-length // 16) + tokens
    silent = longest = 0
    while harness.core.has_work:
        silent = 0 if any(output.token_ids for output in harness.step()) else silent + 1
        longest = max(longest, silent)
        assert harness.num_steps < 6 * ideal * 2
    assert longest <= -(-96 // 16) + depth  # no longer than the longest recomputation
    assert all(result.num_preemptions <= 6 for result in harness.results.values())
    for request_id in harness.asked:
        harness.assert_sequential(request_id)
    first = harness.results["r0"]
    assert first.num_preemptions == 0 and len(first.steps) == tokens


def test_a06_little_is_computed_twice():
    harness = Harness(24, 4, max_num_batched_tokens=16)
    for number in range(12):
        harness.add(f"r{number}", prompt(20, 1000 * number), greedy(40))
    harness.run()
    stats = harness.core.stats()
    assert stats.preemptions_total
    assert stats.recomputed_tokens_total < 12 * 60 / 2


# -------------------------------------------------------------------- A26
@pytest.mark.parametrize("depth", [1, 2])
def test_a26_300_prompts_of_two_tokens(depth: int):
    r = random.Random(26)
    harness = Harness(num_blocks=60, block_size=4, depth=depth)
    for number in range(300):
        length = r.randrange(1, 24)
        harness.add(
            f"r{number}", [r.randrange(2) for _ in range(length)], SamplingParams(temperature=0.0, max_tokens=6)
        )
        if r.random() < 0.7:
            harness.step()
    harness.run()
    for request_id in harness.asked:
        harness.assert_sequential(request_id)
    assert harness.core.stats().prefix_hits_total > 1000


def test_a26_colliding_keys_share_nothing():
    cycle = (1 << 61) - 1  # hash(n) == hash(n + cycle)
    harness = Harness(block_size=4)
    first = prompt(9)
    second = [token + cycle for token in first]
    assert hash(tuple(first)) == hash(tuple(second))
    for tokens in (first, second, first, second):
        harness.complete(tokens, greedy(5))
    for request_id in harness.asked:
        harness.assert_sequential(request_id)
    assert [harness.results[f"r{number}"].cached_tokens for number in range(4)] == [0, 0, 8, 8]


def test_a26_a_block_elsewhere_in_the_prompt_is_another_block():
    harness = Harness(block_size=4)
    one, two = prompt(4), prompt(4, 500)
    harness.complete(one + two, greedy(1))
    assert harness.complete(two + one, greedy(1)).cached_tokens == 0
    assert harness.complete([1, 23, *one], greedy(1)).cached_tokens == 0
    assert harness.complete([12, 3, *one], greedy(1)).cached_tokens == 0


def test_a26_nothing_depends_on_the_hash_seed():
    script = (
        "import random, sys; sys.path[:0] = ['.', 'tests']\n"
        "from fakes import Harness\n"
        "r, harness = random.Random(1), Harness(num_blocks=30, block_size=4)\n"
        "for number in range(60):\n"
        "    harness.add(f'r{number}', [r.randrange(2) for _ in range(20)], salt=r.choice(['a', 'b', None]))\n"
        "    harness.step()\n"
        "harness.run()\n"
        "print([(name, result.token_ids, result.cached_tokens) for name, result in harness.results.items()])\n"
        "print(harness.core.events(5000))\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(answers) == 1


# -------------------------------------------------------------------- A27
@pytest.mark.parametrize("depth", [1, 2])
def test_a27_salt_and_adapter_keep_caches_apart(depth: int):
    harness = Harness(block_size=4, depth=depth)

    def cached(**fields: str) -> int:
        return harness.complete(prompt(10), greedy(2), **fields).cached_tokens

    assert cached(salt="a") == 0
    assert cached(salt="a") == 9  # the positive control
    assert cached(salt="b") == cached() == 0
    assert cached(adapter="lora1") == 0
    assert cached(salt="lora1") == 0
    assert cached(adapter="lora2") == 0
    assert cached(adapter="lora1") == 9
    assert cached(salt="a", adapter="lora1") == 0
    assert cached() == 9


def test_a27_followers_choices_and_preempted_requests_use_the_same_key():
    harness = Harness(num_blocks=14, block_size=4)
    for number, salt in enumerate(("a", "b", "a", "b")):
        harness.add(f"r{number}", prompt(9), greedy(20), salt=salt)
    for index in range(2):
        harness.add(f"c{index}", prompt(9), greedy(4), salt="c", group="g", index=index)
    harness.run()
    assert sum(harness.core.stats().preemptions_total.values()) > 0
    assert [harness.results[name].cached_tokens for name in ("r0", "r1", "c0")] == [0, 0, 0]
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


# -------------------------------------------------------------------- A28
@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [3, 1000])
def test_a28_a_fully_cached_prompt(block_size: int, depth: int, budget: int):
    for length in (block_size - 1, block_size, block_size + 1, 2 * block_size, 5 * block_size):
        harness = Harness(64, block_size, depth=depth, max_num_batched_tokens=budget)
        cached = [harness.complete(prompt(length), greedy(3 * block_size)).cached_tokens for _ in range(4)]
        assert cached == [0, *[length - 1] * 3]
        for request_id in harness.asked:
            harness.assert_sequential(request_id)
        assert harness.core.stats().prefix_hits_total == sum(cached)


def test_a28_the_next_turn_of_a_conversation_hits_everything_before_it():
    harness = Harness(block_size=4)
    history = prompt(7)
    for _ in range(5):
        result = harness.complete(history, greedy(10))
        history = [*history, *result.token_ids, 1, 2, 3]
    turns = [harness.results[f"r{number}"].cached_tokens for number in range(5)]
    assert turns == [0] + [7 + 9 + 13 * number for number in range(4)]  # the last token was never computed


def test_a28_hits_never_reach_the_prompts_length_under_preemption():
    harness = Harness(num_blocks=14, block_size=4)
    for number in range(20):
        harness.add(f"r{number}", prompt(8), greedy(25))
        harness.step()
    harness.run()
    assert all(0 <= result.cached_tokens < 8 for result in harness.results.values())
    assert harness.core.stats().prefix_hits_total == sum(result.cached_tokens for result in harness.results.values())


# -------------------------------------------------------------------- A34
def test_a34_decodes_ride_along_with_every_chunk_and_short_prompts_slip_in():
    harness = Harness(num_blocks=400, block_size=16, max_num_batched_tokens=64)
    chat = harness.add("chat", prompt(8), greedy(200))
    harness.step()
    long = harness.add("long", prompt(4000, 10_000), greedy(4))
    for _ in range(5):
        harness.step()
    short = harness.add("short", prompt(8, 500), greedy(4))
    asked = harness.num_steps
    harness.run()
    gaps = [later - earlier for earlier, later in zip(chat.steps, chat.steps[1:], strict=False)]
    assert set(gaps) == {1}
    assert short.steps[0] - asked == 1
    assert long.steps[0] <= 1 + 4000 // (64 - 4) + 2  # and the long one is not held up
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 15, 16, 10_000])
def test_a34_chunking_never_changes_an_answer(chunk: int, caching: bool):
    harness = Harness(100, 16, max_num_batched_tokens=chunk, prefix_caching=caching)
    for number in range(4):
        harness.add(f"r{number}", prompt(40 + number, 1000 * (number // 2)), greedy(20))
    harness.run()
    for request_id in harness.asked:
        harness.assert_sequential(request_id)


# -------------------------------------------------------------------- A35
def test_a35_usage_returns_to_its_base_and_stays_between_0_and_1():
    r = random.Random(35)
    harness = Harness(num_blocks=30, block_size=4, max_num_seqs=6)
    harness.executor.row_error = lambda request_id, generated: "bad" if request_id.endswith("7") else None
    harness.complete(prompt(10), greedy(3))
    before, samples, previous = harness.core.memory_stats(), [], harness.core.stats()
    for number in range(200):
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=r.randrange(1, 30))
        group = f"g{number // 2}" if number % 4 < 2 else None
        harness.add(
            f"r{number}", prompt(r.randrange(1, 30), 100 * r.randrange(3)), params, group=group, index=number % 2
        )
        if r.random() < 0.2:
            harness.core.abort([r.choice(list(harness.asked))])
        if r.random() < 0.8:
            harness.step()
        samples.append(harness.core.memory_stats())
        stats = harness.core.stats()
        assert stats.pages_free + stats.pages_active + stats.pages_cached == stats.pages_total
        assert stats.pages_shared <= stats.pages_active and stats.tokens_stored <= stats.pages_active * 4
        for name in stats.__struct_fields__:
            if name.endswith("_total") and not isinstance(getattr(stats, name), dict):
                assert getattr(stats, name) >= getattr(previous, name), name
        previous = stats
    harness.run()
    assert previous.preemptions_total and previous.evictions_total
    assert all(0 <= sample[name] <= 1 for sample in samples for name in ("utilization", "slot_utilization"))
    assert max(sample["utilization"] for sample in samples) > 0.8
    after = harness.core.memory_stats()
    assert after["utilization"] == before["utilization"] == 0 and after["active_requests"] == 0
    harness.assert_idle()


def test_sequential_is_not_trivial():
    """The oracle's answers differ from prompt to prompt and end in different ways."""
    answers = [sequential(prompt(9, start), SamplingParams(max_tokens=60), 0, 1000) for start in range(50)]
    assert len({tuple(tokens) for tokens, _ in answers}) == 50
    assert {reason for _, reason in answers} == {"stop", "length"}
