import subprocess
import sys
from pathlib import Path

import pytest
from fakes import Harness, make_request, prompt

from engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("broken_step", [1, 3])
def test_an_executor_that_breaks_ends_everything_and_leaves_no_page_behind(depth: int, broken_step: int):
    harness = Harness(num_blocks=32, block_size=4, max_num_batched_tokens=16, depth=depth)
    harness.complete(prompt(9, 900), GREEDY)
    harness.executor.break_at = harness.executor.last_step + broken_step
    for number in range(3):
        harness.add(f"r{number}", prompt(20, 100 * (number // 2)), GREEDY)
    harness.add("waiting", prompt(30), GREEDY, group="g")
    harness.add("held", prompt(30), GREEDY, group="g", index=1)
    with pytest.raises(RuntimeError, match="the device is gone"):
        harness.run()
    harness.core.check()
    harness.assert_idle()
    assert not harness.core.has_work
    harness.kv.open_step(10_000)
    kept = harness.kv.match_prefix(make_request(prompt(9, 900)))
    assert kept.num_tokens == 8  # confirmed before
    if broken_step == 1:
        assert harness.kv.match_prefix(make_request(prompt(20))).num_tokens == 0
    stats = harness.core.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_what_a_broken_step_was_to_compute_is_not_found_afterwards():
    harness = Harness(num_blocks=32, block_size=4)
    harness.executor.break_at = 1
    harness.add("r", prompt(20), GREEDY)
    with pytest.raises(RuntimeError):
        harness.step()
    harness.core.check()
    assert harness.kv.pool.num_free == 32 and not harness.kv.tree.roots
    assert harness.core.stats().evictions_total == {"failed_step": 5}


def test_memory_stats_have_the_promised_keys_and_add_up():
    harness = Harness(num_blocks=20, block_size=4)
    harness.add("one", prompt(10), GREEDY)
    harness.add("two", prompt(10), GREEDY)
    harness.step()
    memory = harness.core.memory_stats()
    assert set(memory) == {
        "total_pages",
        "used_pages",
        "cached_pages",
        "free_pages",
        "utilization",
        "slot_utilization",
        "active_requests",
        "bytes_per_page",
        "bytes_per_token",
        "total_bytes",
    }
    assert (memory["used_pages"], memory["active_requests"], memory["utilization"]) == (4, 2, 0.2)
    assert memory["slot_utilization"] == 12 / 16  # 8 tokens shared, 2 in each tail
    assert memory["total_bytes"] == 20 * memory["bytes_per_page"]
    harness.run()
    memory = harness.core.memory_stats()
    assert memory["used_pages"] == memory["utilization"] == 0
    assert memory["slot_utilization"] == 1, "nothing is wasted, as at /metrics"
    assert memory["cached_pages"] + memory["free_pages"] == memory["total_pages"]


def test_a_snapshot_is_its_own_object():
    harness = Harness()
    before = harness.core.stats()
    before.evictions_total["mine"] = 1
    harness.complete(prompt(4), GREEDY)
    assert before.generated_tokens_total == 0 and "mine" not in harness.core.stats().evictions_total


def test_time_is_counted_where_it_is_spent():
    harness = Harness()
    ticks = iter(range(1000))
    harness.core._clock = lambda: float(next(ticks))
    harness.add("r", prompt(4), GREEDY)
    harness.core.step()
    stats = harness.core.stats()
    assert (stats.schedule_seconds_total, stats.execute_seconds_total, stats.update_seconds_total) == (1.0, 2.0, 1.0)


def test_an_idle_core_has_no_work_and_steps_to_nothing():
    harness = Harness()
    assert not harness.core.has_work and harness.core.step() == []
    harness.core.shutdown()
    harness.core.shutdown()


def test_the_core_loads_neither_torch_nor_numpy():
    code = "import sys, engine.core.loop; assert not {'torch', 'numpy', 'zmq', 'fastapi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
