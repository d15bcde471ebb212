"""The planner: what it says of fitting is what the engine's own sizing then holds."""

import json
from pathlib import Path
from typing import Any

import published_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import SettingsError, StartupError
from configs.plan import Plan, make_plan
from configs.plan_costs import memory_for, pool_for, reserved_bytes, useful_share
from configs.plan_lengths import Lengths, assumed_lengths
from configs.plan_options import Load, Option, Question
from configs.pool import Costs, Memory, resolve_num_blocks, size_pools
from configs.settings import Settings
from configs.supported import read_model

GIB = 2**30
LENGTHS = Lengths(tuple(range(10, 4001, 10)), "made up")
"""p50 2,000 and p95 3,800 tokens."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    return {name: published_models.sizes(folder, name) for name in published_models.OURS}


def question(
    model: Any, gpu: float | None = None, memory: float | None = None, ranks: int = 1, **given: Any
) -> Question:
    size = gpu or memory
    there = None if size is None else Memory(int(size * GIB), is_gpu=gpu is not None)
    return Question(Settings(**{"max_num_seqs": 16, **given}), model, there, ranks)


def plan(*arguments: Any, context: int | None = None, **given: Any) -> Plan:
    return make_plan(question(*arguments, **given), LENGTHS, context)


def option(found: Plan, kind: str, words: str = "") -> Option:
    return next(each for each in found.options if each.kind == kind and words in each.words)


# ---------------------------------------------------------------- kinds of layers
@pytest.mark.parametrize(
    ("name", "attention", "per_token"),
    [("Llama-2-7B", "MHA", 524_288), ("Llama-3.1-70B", "GQA", 327_680), ("SmolLM2-1.7B", "MHA", 196_608)],
)
def test_layers_of_one_kind(name: str, attention: str, per_token: int, models) -> None:
    found = plan(models[name])
    [kind] = found.kinds
    assert (kind.attention, kind.bytes_per_token, kind.bytes_per_block) == (attention, per_token, 16 * per_token)
    assert kind.num_layers == models[name].num_layers and found.rank_kinds == found.kinds and found.replication == 1


def test_windows_and_a_single_kv_head(models) -> None:
    found = plan(models["Gemma-3-1B"])
    kinds = {kind.layer.window: kind for kind in found.kinds}
    assert {window: (kind.num_layers, kind.attention) for window, kind in kinds.items()} == {
        512: (22, "MQA"),
        None: (4, "MQA"),
    }
    assert sum(kind.bytes_per_token for kind in found.kinds) == 26_624
    assert found.context_bytes == 4 * 1024 * 32_768 + 22 * 1024 * 512


def test_formats_of_layers(models) -> None:
    """Layers with a window keep the model's format, as the engine has it."""
    found = plan(models["Gemma-3-1B"], kv_cache_dtype="int8", kv_cache_dtype_v="int4")
    formats = {kind.layer.window: tuple(form.value for form in kind.layer.formats) for kind in found.kinds}
    assert formats == {512: ("bf16", "bf16"), None: ("int8", "int4")}


def test_gpus_with_a_kv_head_each(models) -> None:
    found = plan(models["Qwen2.5-7B"], ranks=8)
    [kind] = found.rank_kinds
    assert (kind.query_heads, kind.layer.kv_heads, kind.bytes_per_token) == (4, 1, 14_336)
    assert found.replication == 2 and found.kinds[0].layer.kv_heads == 4
    assert found.whole.weight_bytes / 8 < found.costs.weight_bytes < found.whole.weight_bytes / 7


# ---------------------------------------------------------------- what fits
def test_the_engines_own_pools(models) -> None:
    """The same function with the same numbers."""
    asked = question(models["Llama-3.1-8B"], gpu=80, max_model_len=8192)
    found = make_plan(asked, LENGTHS)
    costs = Costs.of(asked.settings, models["Llama-3.1-8B"], "bfloat16")
    assert found.pool == size_pools(asked.settings, costs, Memory(80 * GIB, is_gpu=True))
    assert found.pool == resolve_num_blocks(
        asked.settings,
        costs.layout,
        window=8192,
        available_bytes=80 * GIB,
        weight_bytes=costs.weight_bytes,
        work_bytes=costs.step.total,
        default_share=0.9,
    )
    assert found.is_served and not found.refusal


def test_requests_at_once(models) -> None:
    found = plan(models["Llama-2-7B"], gpu=40)
    assert found.pool is not None
    paged, reserved = option(found, "paging"), option(found, "reservation")
    pages = found.pool.num_blocks
    assert (paged.at_p50, paged.at_p95) == (pages // 125, pages // 238), "2,000 tokens are 125 pages"
    assert reserved.at_p50 == reserved.at_p95 == found.pool.pool_bytes // (4096 * 524_288)
    assert paged.at_p50 > paged.at_p95 >= reserved.at_p95


def test_nothing_is_said_of_what_fits_without_a_memory(models) -> None:
    found = plan(models["Llama-2-7B"])
    assert found.pool is None and found.is_served is None and found.cheapest is None and not found.refusal
    assert all(each.at_p50 is each.at_p95 is each.at_load is each.fits is None for each in found.options)
    assert all(each.memory_bytes is not None for each in found.options)


def test_weights_that_do_not_fit(models) -> None:
    found = plan(models["Llama-3.1-70B"], gpu=80)
    assert found.pool is None and found.is_served is False
    assert "--model: the weights" in found.refusal and found.ranks_needed == 2
    assert {each.at_p95 for each in found.options} == {0}
    assert plan(models["Llama-3.1-70B"], gpu=80, ranks=2).is_served is not None
    assert plan(models["Llama-3.1-70B"], gpu=1).ranks_needed is None, "64 GPUs of 1 GiB hold no 131 GiB"
    assert plan(models["Llama-3.1-70B"], memory=80).ranks_needed is None, "a CPU is not split"


def test_a_context_longer_than_the_pool(models) -> None:
    given = {"gpu": 24.0, "max_model_len": 131072}
    assert plan(models["Llama-3.1-8B"], context=4096, **given).is_served is True
    assert plan(models["Llama-3.1-8B"], context=131072, **given).is_served is False
    found = plan(models["Llama-3.1-8B"], context=131072, **given)
    assert found.load == Load(16, 131072) and option(found, "paging").at_load == 0


@pytest.mark.parametrize("context", [0, 4097])
def test_a_context_that_no_sequence_has(context: int, models) -> None:
    with pytest.raises(SettingsError, match=rf"--context {context} is not within the window of 4096 tokens"):
        plan(models["Llama-2-7B"], context=context)


def test_a_cpu_has_its_own_rules(models) -> None:
    found = plan(models["SmolLM2-135M"], memory=16, max_num_seqs=128)
    assert found.pool is not None and found.pool.decided_by == "the default limit of 4 GiB"
    with pytest.raises(SettingsError, match="--dtype float16 is for GPUs"):
        plan(models["SmolLM2-135M"], memory=16, dtype="float16")
    assert plan(models["SmolLM2-135M"], gpu=16, dtype="float16").costs.weight_bytes > 0


def test_the_copy_that_refreshes_work_in_is_counted(models) -> None:
    """One sequence of the whole window in the model's format, on a CPU too."""
    without, with_it = (
        plan(models["SmolLM2-135M"], memory=16, kv_cache_dtype="int8", kv_refresh_interval=interval)
        for interval in (None, 64)
    )
    assert with_it.costs.refresh_bytes == 8192 * 23_040 and without.costs.refresh_bytes == 0
    asked = {"max_num_seqs": 16, "gpu_memory_utilization": 0.1, "kv_cache_dtype": "int8"}
    pools = [
        make_plan(question(models["SmolLM2-135M"], memory=16, kv_refresh_interval=interval, **asked), LENGTHS).pool
        for interval in (None, 64)
    ]
    assert pools[0].pool_bytes - pools[1].pool_bytes == pytest.approx(8192 * 23_040, rel=0.01)  # type: ignore[union-attr]


# ---------------------------------------------------------------- ways to hold the load
def test_changes_come_in_the_order_of_their_price(models) -> None:
    found = plan(models["Llama-2-7B"], gpu=40)
    assert [(each.kind, each.words) for each in found.options] == [
        ("reservation", "in one piece, 4,096 tokens each"),
        ("paging", "in pages, as it is"),
        ("heads", "another model: 16 of 32 KV heads"),
        ("heads", "another model: 8 of 32 KV heads"),
        ("heads", "another model: 1 of 32 KV heads"),
        ("format", "--kv-cache-dtype int8"),
        ("format", "--kv-cache-dtype int4"),
    ]
    assert [each.bytes_per_token for each in found.options[1:]] == [524_288, 262_144, 131_072, 16_384, 266_240, 163_840]
    assert not option(found, "paging").fits
    assert found.cheapest == option(found, "heads", "16 of 32"), "the most KV heads with which the load fits"


def test_where_pages_are_enough_no_change_is_needed(models) -> None:
    found = plan(models["Llama-2-7B"], gpu=49)
    assert not option(found, "reservation").fits and option(found, "paging").fits
    assert found.cheapest == option(found, "paging")


def test_a_model_with_one_kv_head_can_only_be_quantised(models) -> None:
    found = plan(models["Gemma-3-1B"], gpu=3.5, max_num_seqs=128)
    assert {each.kind for each in found.options} == {"reservation", "paging", "format"}


def test_what_is_quantised_already_is_not_proposed(models) -> None:
    words = [each.words for each in plan(models["Llama-2-7B"], kv_cache_dtype="int8").options if each.kind == "format"]
    assert words == ["--kv-cache-dtype int4"]
    assert not [e for e in plan(models["Llama-2-7B"], kv_cache_dtype="int4").options if e.kind == "format"]


def test_fewer_heads_must_be_fewer_on_each_gpu(models) -> None:
    assert not [e for e in plan(models["Llama-3.1-70B"], ranks=8).options if e.kind == "heads"]
    words = [e.words for e in plan(models["Llama-3.1-70B"], ranks=4).options if e.kind == "heads"]
    assert words == ["another model: 4 of 8 KV heads"]


def test_gpus_that_hold_the_load(models) -> None:
    found = plan(models["Llama-3.1-70B"], gpu=80, max_num_seqs=128)
    assert found.ranks_needed == 2 and found.ranks_for_load == 4
    assert option(plan(models["Llama-3.1-70B"], gpu=80, max_num_seqs=128, ranks=4), "paging").fits
    assert not option(plan(models["Llama-3.1-70B"], gpu=80, max_num_seqs=128, ranks=2), "paging").fits


NAMES = ("Llama-2-7B", "SmolLM2-135M", "Gemma-3-1B", "Gemma-3-270M", "Qwen2.5-0.5B")


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    count=st.integers(1, 64),
    tokens=st.integers(1, 4096),
    block_size=st.sampled_from([4, 16, 64]),
    is_gpu=st.booleans(),
    form=st.sampled_from(["auto", "int8", "int4"]),
)
def test_the_memory_that_a_load_needs_holds_it_and_no_less_does(
    name: str, count: int, tokens: int, block_size: int, is_gpu: bool, form: str, models
) -> None:
    given = Settings(max_num_seqs=64, block_size=block_size, kv_cache_dtype=form)
    costs = Costs.of(given, models[name], "bfloat16")
    size = pool_for(given, costs, count, tokens)
    assert size is not None
    sized = given.model_copy(update={"kv_cache_memory_bytes": size})
    memory = memory_for(given, costs, size, Memory(0, is_gpu))
    pool = size_pools(sized, costs, Memory(memory, is_gpu))
    assert pool.sequences(tokens) >= count and pool.max_model_len >= tokens
    if is_gpu:  # a GPU gives as much without a flag, if pages are large enough to be that few
        by_default = size_pools(given, costs, Memory(memory, is_gpu))
        assert by_default.sequences(tokens) >= count or "limit" in by_default.decided_by
    less = given.model_copy(update={"kv_cache_memory_bytes": size - 1})
    try:
        smaller = size_pools(less, costs, Memory(memory, is_gpu))
    except SettingsError:
        return
    assert smaller.sequences(tokens) < count or smaller.max_model_len < tokens


def test_useful_shares(models) -> None:
    """Half a page is lost at a sequence's end; what is reserved beyond it, wholly."""
    costs = Costs.of(Settings(), models["Llama-2-7B"], "bfloat16")
    assert useful_share(costs.layout, [16, 32]) == 1.0
    assert useful_share(costs.layout, [8]) == 0.5
    assert reserved_bytes(costs.layout, 4096, 512) == 4096 * 524_288
    assert useful_share(costs.layout, [1024], held=4096 * 524_288) == 0.25
    found = make_plan(question(models["Llama-2-7B"]), assumed_lengths())
    assert found.useful_in_pages > 0.99 and found.useful_in_reservations < 0.35


def test_reservations_of_windows_are_as_long_as_windows(models) -> None:
    costs = Costs.of(Settings(), models["Gemma-3-1B"], "bfloat16")
    assert reserved_bytes(costs.layout, 32768, 512) == 4 * 1024 * 32768 + 22 * 1024 * (512 + 512)


# ---------------------------------------------------------------- nonsense
def test_more_gpus_than_heads(models) -> None:
    with pytest.raises(SettingsError, match="--tp 33 is more than the model's 32 query heads"):
        plan(models["Llama-2-7B"], ranks=33)


def test_a_window_that_the_model_has_not(models) -> None:
    with pytest.raises(StartupError, match="--max-model-len 8192 is not possible: this model takes 1 to 4096"):
        plan(models["Llama-2-7B"], max_model_len=8192)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_key_value_heads": 64}, "num_key_value_heads must be a divisor of the 32 attention heads, got 64"),
        ({"hidden_size": -4096}, "hidden_size must be an integer of at least 1, got -4096"),
        ({"hidden_size": 640 * 10**9}, "hidden_size must be at most"),
        ({"hidden_size": 10**6}, "hidden_size is 1000000, and no model has more than 131072"),
        ({"head_dim": 4096}, "head_dim is 4096, and no model has more than 1024"),
        ({"head_dim": 1024, "hidden_size": 256}, "32 attention heads of 1024 numbers are 32768 beside a hidden_size"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000"),
        ({"num_hidden_layers": 10**6}, "1000000 layers are too many"),
        (
            {"intermediate_size": 2**20, "hidden_size": 2**17, "head_dim": 128, "num_hidden_layers": 4096},
            "parameters, and no model has",
        ),
    ],
)  # fmt: skip
def test_640_gb_of_nothing_is_an_error(changed: dict[str, object], words: str, tmp_path: Path) -> None:
    config = {**published_models.OURS["Llama-2-7B"], **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError) as caught:
        plan(read_model(tmp_path))
    message = str(caught.value)
    assert message.startswith("--model: ") and words in message and message.endswith(".") and "\n" not in message
