"""The planner: what it says of fitting is what the engine's own sizing then holds."""

from dataclasses import replace
from typing import Any

import published_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import SettingsError, StartupError
from configs.model import GenerationDefaults
from configs.plan import Plan, make_plan
from configs.plan_costs import memory_for, pool_for, reserved_bytes, useful_share
from configs.plan_lengths import Lengths, assumed_lengths
from configs.plan_options import Load, Option, Question
from configs.pool import STEP, Costs, Memory, resolve_num_blocks, size_pools
from configs.probed import LayerCall, ProbedConfig
from configs.settings import Settings

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
    return Question(Settings(**{"max_num_seqs": 16, "max_num_batched_tokens": 512, **given}), model, there, ranks)


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
    found = plan(models["Qwen2.5-3B"], ranks=4)
    [kind] = found.rank_kinds
    assert (kind.query_heads, kind.layer.kv_heads, kind.bytes_per_token) == (4, 1, 18_432)
    assert found.replication == 2 and found.kinds[0].layer.kv_heads == 2
    assert found.whole.weight_bytes / 4 < found.costs.weight_bytes < found.whole.weight_bytes / 3


# ---------------------------------------------------------------- what fits
def test_a_context_is_gathered_where_plain_torch_is_asked_for(models) -> None:
    """As the engine reckons, so that no plan says "served" where the engine refuses."""
    usual, plain = (
        plan(models["Llama-3.1-8B"], gpu=80, attention_backend=name).costs.step for name in ("auto", "reference")
    )
    assert usual.context == 0 and plain.context == 2 * 131072 * 8 * 128 * 12


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
        work={STEP: costs.step.total},
        is_gpu=True,
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
    assert found.pool is None and found.is_served is None and found.advised is None and not found.refusal
    assert all(each.at_p50 is each.at_p95 is each.at_load is each.fits is None for each in found.options)
    assert all(each.memory_bytes is not None for each in found.options)


def test_weights_that_do_not_fit(models) -> None:
    found = plan(models["Llama-3.1-70B"], gpu=80)
    assert found.pool is None and found.is_served is False
    assert "--model: the weights" in found.refusal and found.ranks_needed == 2
    assert {each.at_p95 for each in plan(models["Llama-3.1-70B"], gpu=64).options} == {0}
    assert plan(models["Llama-3.1-70B"], gpu=80, ranks=2).is_served is not None
    assert plan(models["Llama-3.1-70B"], gpu=1).ranks_needed is None, "64 GPUs of 1 GiB hold no 131 GiB"
    assert plan(models["Llama-3.1-70B"], memory=80).ranks_needed is None, "a CPU is not split"


def test_a_context_longer_than_the_pool(models) -> None:
    given = {"gpu": 24.0, "max_model_len": 131072}
    assert plan(models["Llama-3.1-8B"], context=4096, **given).is_served is True
    assert plan(models["Llama-3.1-8B"], context=131072, **given).is_served is False
    found = plan(models["Llama-3.1-8B"], context=131072, **given)
    assert found.load == Load(16, 131072) and option(found, "paging").at_load == 0


def test_a_context_that_no_sequence_has(models) -> None:
    with pytest.raises(SettingsError, match="--context 4097 is not within the window of 4096 tokens: lower it"):
        plan(models["Llama-2-7B"], context=4097)
    with pytest.raises(SettingsError, match="--context 0 is no length of a sequence: give at least 1"):
        plan(models["Llama-2-7B"], context=0)


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
        ("format", "--kv-cache-dtype int8 --kv-cache-dtype-v int4"),
        ("format", "--kv-cache-dtype int4"),
        ("weights", "--quantization int8"),
    ]
    sizes = [each.bytes_per_token for each in found.options[1:]]
    assert sizes == [524_288, 262_144, 131_072, 16_384, 266_240, 215_040, 163_840, 524_288]
    assert not option(found, "paging").fits
    assert option(found, "heads", "16 of 32").fits, "the most KV heads with which the load fits"
    assert found.advised == option(found, "format", "--kv-cache-dtype int8"), "of the same model"


def test_where_pages_are_enough_no_change_is_needed(models) -> None:
    found = plan(models["Llama-2-7B"], gpu=49)
    assert not option(found, "reservation").fits and option(found, "paging").fits
    assert found.advised == option(found, "paging")


def test_a_model_with_one_kv_head_can_only_be_quantised(models) -> None:
    found = plan(models["Gemma-3-1B"], gpu=3.5, max_num_seqs=128)
    assert {each.kind for each in found.options} == {"reservation", "paging", "format", "weights"}


def test_weights_in_int8_cost_less_than_a_cache_in_four_bits_on_a_cpu_and_most_on_a_gpu(models) -> None:
    """Their figures are those of a plan with the flag."""
    given = {"kv_cache_memory_bytes": "8GiB", "max_num_seqs": 4}
    for place, there in ((-1, {"gpu": 20}), (-1, {}), (3, {"memory": 20})):
        found = plan(models["Llama-2-7B"], **there, **given)
        weights = [each for each in found.options if each.kind in ("format", "weights", "paging", "reservation")][place]
        flagged = plan(models["Llama-2-7B"], **there, **given, quantization="int8")
        assert weights == replace(flagged.in_pages, kind="weights", words="--quantization int8")
        assert weights.weight_bytes == flagged.costs.weight_bytes < 0.52 * found.costs.weight_bytes
        assert not [each for each in flagged.options if each.kind == "weights"]


def test_weights_in_int8_are_advised_where_nothing_cheaper_makes_the_load_fit(models) -> None:
    found = plan(models["Llama-2-7B"], memory=12, max_num_seqs=2, context=2048)
    assert found.pool is None and found.advised == option(found, "weights")


def test_weights_that_transformers_code_multiplies_by_stay_as_they_are() -> None:
    calls = (LayerCall(0, 8, 8, 64, None),)
    model = ProbedConfig("X", 1000, None, GenerationDefaults(), (4096, 4096), calls, 10**6, 0)
    assert not [each for each in plan(model, memory=1).options if each.kind == "weights"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_cache_dtype": "int8"}, ["--kv-cache-dtype-v int4", "--kv-cache-dtype int4"]),
        ({"kv_cache_dtype": "int4"}, []),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_v": "int4"}, ["--kv-cache-dtype int4 --kv-cache-dtype-v auto"]),
        (
            {"kv_cache_dtype_v": "int8"},
            [
                "--kv-cache-dtype int8 --kv-cache-dtype-v auto",
                "--kv-cache-dtype int8 --kv-cache-dtype-v int4",
                "--kv-cache-dtype int4 --kv-cache-dtype-v auto",
            ],
        ),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_v": "int4", "kv_cache_scales": "x.safetensors"},
            ["--kv-cache-dtype int4 --kv-cache-dtype-v auto without --kv-cache-scales"],
        ),
    ],
)
def test_formats_are_what_to_add_to_the_command(given: dict[str, Any], words: list[str], models) -> None:
    """The flags, given so, take what stands behind them; what takes no less than now is not proposed."""
    found = [each for each in plan(models["Llama-2-7B"], **given).options if each.kind == "format"]
    assert [each.words for each in found] == words
    for each in found:
        flags, _, left_out = each.words.partition(" without ")
        parts = flags.split()
        added = {name[2:].replace("-", "_"): value for name, value in zip(parts[::2], parts[1::2], strict=True)}
        added |= {left_out[2:].replace("-", "_"): None} if left_out else {}
        assert each.bytes_per_token == plan(models["Llama-2-7B"], **{**given, **added}).costs.layout.bytes_per_token


def more_memory(name: str, words: str, models: dict[str, Any], **given: Any) -> None:
    """That the flag in these words, in place of what is given, holds the load and is the first advice."""
    found = plan(models[name], **given)
    best = found.advised
    assert not found.in_pages.fits and best is not None and (best.kind, best.words) == ("memory", words)
    assert found.options.index(best) == 2
    flag, value = words.split()
    raised = plan(models[name], **{**given, flag[2:].replace("-", "_"): value})
    assert raised.in_pages.fits and raised.load == found.load
    assert raised.in_pages == replace(best, kind="paging", words=raised.in_pages.words)


def test_a_share_that_is_raised(models) -> None:
    """Above the default too, up to 0.95; without the memory for the load it is no advice."""
    more_memory("Llama-3.1-8B", "--gpu-memory-utilization 0.24", models, gpu=100, gpu_memory_utilization=0.2)
    more_memory("Llama-3.1-8B", "--gpu-memory-utilization 0.94", models, gpu=25.2)
    assert plan(models["Llama-3.1-8B"], gpu=26.4).in_pages.fits
    for flags in ({"gpu": 24.7}, {"gpu": 24.5, "gpu_memory_utilization": 0.96}):
        found = plan(models["Llama-3.1-8B"], **flags)
        assert not found.in_pages.fits and "memory" not in {each.kind for each in found.options}


def test_a_size_that_is_raised(models) -> None:
    """Whichever flag decides: one that stands below it would change nothing."""
    pages, size = "--num-gpu-blocks-override 3808", "--kv-cache-memory-bytes 30464MiB"
    more_memory("Llama-2-7B", pages, models, memory=200, num_gpu_blocks_override=10)
    more_memory("Llama-2-7B", pages, models, gpu=80, num_gpu_blocks_override=10, kv_cache_memory_bytes=1)
    more_memory("Llama-2-7B", pages, models, gpu=80, num_gpu_blocks_override=10, gpu_memory_utilization=0.1)
    more_memory("Llama-2-7B", size, models, memory=200, kv_cache_memory_bytes=1024)
    more_memory("Llama-2-7B", size, models, gpu=80, kv_cache_memory_bytes="200GiB", gpu_memory_utilization=0.2)
    more_memory("Llama-2-7B", size, models, memory=200)
    assert plan(models["Llama-2-7B"], memory=42, num_gpu_blocks_override=10).advised is None


def test_in_the_least_memory_for_a_load_its_size_is_said_in_bytes(models) -> None:
    """The next whole MiB would not fit there."""
    settings = Settings(kv_cache_memory_bytes="200GiB", max_num_seqs=3)

    def advised(size: int) -> str:
        question = Question(settings, models["SmolLM2-135M"], Memory(size, is_gpu=True))
        best = make_plan(question, LENGTHS, None).advised
        return best.words if best is not None and best.kind == "memory" else ""

    low, high = 0, 80 * GIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if advised(middle) else (middle, high)
    assert advised(high).split()[1].isdigit() and advised(high + 2**20).endswith("MiB"), advised(high)


def test_a_share_that_does_not_decide_says_nothing_of_what_a_load_needs(models) -> None:
    found = plan(models["Llama-2-7B"], gpu=80, kv_cache_memory_bytes="40GiB", gpu_memory_utilization=0.2)
    paged, costs = found.in_pages, found.costs
    assert paged.fits and paged.pool_bytes is not None
    assert paged.memory_bytes == costs.weight_bytes + costs.step.total + paged.pool_bytes + 1


def test_refreshes_that_never_come_are_refused(models) -> None:
    """Also where the pool, not the window, is what is shorter than the interval."""
    given = {"kv_cache_dtype": "int8", "kv_refresh_interval": 1000}
    found = plan(models["SmolLM2-135M"], memory=16, kv_cache_memory_bytes="11MiB", **given)
    assert found.pool is None and found.refusal == (
        "--kv-refresh-interval 1000 never comes, since the KV cache (--kv-cache-memory-bytes 11 MiB) holds sequences "
        "of 944 tokens, and none generates more than 943: lower it, or raise --kv-cache-memory-bytes."
    )
    assert plan(models["SmolLM2-135M"], memory=16, kv_cache_memory_bytes="12MiB", **given).pool is not None
    refusal = plan(models["SmolLM2-135M"], memory=16, num_gpu_blocks_override=2, **given).refusal
    assert "(--num-gpu-blocks-override 2) holds sequences of 32 tokens" in refusal


def test_what_takes_the_memory_is_called_by_its_name(models) -> None:
    """On a GPU a step and a refresh's copy, on a CPU the copy alone."""
    given = {"kv_cache_dtype": "int8", "kv_refresh_interval": 64}
    on_a_cpu = plan(models["SmolLM2-135M"], memory=0.3, **given).refusal
    assert on_a_cpu.startswith("--model: the weights and the 180 MiB of a refresh take ")
    assert on_a_cpu.endswith(
        ": free memory or give a smaller --model or --max-model-len, or leave out --kv-refresh-interval."
    )
    on_a_gpu = plan(models["SmolLM2-135M"], gpu=0.3, **given).refusal
    assert " of a step and the 180 MiB of a refresh take " in on_a_gpu
    decided = plan(models["SmolLM2-135M"], gpu=16, **given).pool.decided_by
    assert decided.endswith("beside the weights, a step and a refresh)")


def test_fewer_requests_at_once_where_pages_are_kept_for_windows(models) -> None:
    """The most that run with themselves as the limit; nothing where layers have no windows, or all run."""
    found = plan(models["Gemma-3-27B"], gpu=80, max_num_seqs=128, max_model_len=32768, context=32768)
    fewer = option(found, "requests")
    assert found.in_pages.at_load == 1 and (fewer.words, fewer.at_load, fewer.fits) == ("--max-num-seqs 5", 5, False)
    assert found.options.index(fewer) == 2 and found.advised is not fewer
    for limit, fits in ((5, True), (6, False)):
        again = plan(models["Gemma-3-27B"], gpu=80, max_num_seqs=limit, max_model_len=32768, context=32768)
        assert again.in_pages.fits is fits
    for name, gpu, seqs in (("Gemma-3-27B", 80, 4), ("Llama-3.1-8B", 24, 128)):
        found = plan(models[name], gpu=gpu, max_num_seqs=seqs, max_model_len=32768, context=32768)
        assert "requests" not in {each.kind for each in found.options}


def test_layers_with_windows_may_be_quantised_too(models) -> None:
    """Where others are not windowed, so that they are skipped of themselves; the flag alone where a format is given."""
    none = "--kv-cache-dtype-skip-layers none"
    words = [each.words for each in plan(models["Gemma-3-27B"], gpu=80).options if each.kind == "format"]
    assert words[3:] == [
        f"--kv-cache-dtype int8 {none}",
        f"--kv-cache-dtype int8 --kv-cache-dtype-v int4 {none}",
        f"--kv-cache-dtype int4 {none}",
    ]
    given = {"kv_cache_dtype": "fp8", "kv_cache_scales": "x.safetensors"}
    found = plan(models["Gemma-3-27B"], gpu=80, **given)
    alone = option(found, "format", none)
    assert alone.words == none
    changed = plan(models["Gemma-3-27B"], gpu=80, kv_cache_dtype_skip_layers="none", **given)
    assert alone.bytes_per_token == changed.costs.layout.bytes_per_token < found.costs.layout.bytes_per_token / 1.5
    assert not [each for each in changed.options if none in each.words]
    assert not [each for each in plan(models["Llama-2-7B"], gpu=80).options if none in each.words]


def test_pages_of_windows_are_counted_as_the_flag_counts_them(models) -> None:
    """Those of the layers that see everything, or of the widest window where none does."""
    more_memory("Gemma-3-1B", "--num-gpu-blocks-override 3808", models, gpu=80, num_gpu_blocks_override=10)
    windows = replace(models["Gemma-3-1B"], layer_windows=(512,) * 26)
    more_memory("-", "--num-gpu-blocks-override 576", {"-": windows}, gpu=80, num_gpu_blocks_override=10)


def test_fewer_heads_must_be_fewer_on_each_gpu(models) -> None:
    assert not [e for e in plan(models["Llama-3.1-70B"], ranks=8).options if e.kind == "heads"]
    words = [e.words for e in plan(models["Llama-3.1-70B"], ranks=4).options if e.kind == "heads"]
    assert words == ["another model: 4 of 8 KV heads"]


def test_fewer_heads_must_be_split_evenly_too(models) -> None:
    """8 KV heads, as is usual, would divide 24 query heads, and cannot be split among 3 GPUs."""
    found = plan(replace(models["Llama-3.2-3B"], num_kv_heads=24), gpu=4, ranks=3, max_num_seqs=30)
    assert [e.words for e in found.options if e.kind == "heads"] == ["another model: 3 of 24 KV heads"]


def test_gpus_that_hold_the_load(models) -> None:
    found = plan(models["Llama-3.1-70B"], gpu=82, max_num_seqs=128)
    assert found.ranks_needed == 2 and found.ranks_for_load == 4
    assert option(plan(models["Llama-3.1-70B"], gpu=82, max_num_seqs=128, ranks=4), "paging").fits
    assert not option(plan(models["Llama-3.1-70B"], gpu=82, max_num_seqs=128, ranks=2), "paging").fits
    assert plan(models["SmolLM2-135M"], gpu=0.9).ranks_needed == 3, "2 do not divide 9 query heads"


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
    costs = Costs.of(given, models[name], "bfloat16", is_gpu)
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
@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("Llama-2-7B", 33, "32 query and 32 KV heads evenly: 1, 2, 4, 8, 16 or 32 would."),
        ("Llama-3.1-8B", 3, "32 query and 8 KV heads evenly: 1, 2, 4, 8, 16 or 32 would."),
        ("Qwen2.5-7B", 8, "28 query and 4 KV heads evenly: 1, 2, 4 or 28 would."),
        ("Qwen2.5-7B", 7, "28 query and 4 KV heads evenly"),  # the second GPU would need two KV heads, the first one
        ("Qwen2.5-0.5B", 3, "14 query and 2 KV heads evenly: 1, 2 or 14 would."),
        ("SmolLM2-135M", 2, "9 query and 3 KV heads evenly: 1, 3 or 9 would."),
    ],
)
def test_gpus_that_heads_cannot_be_split_among(name: str, ranks: int, words: str, models) -> None:
    with pytest.raises(SettingsError) as caught:
        plan(models[name], ranks=ranks)
    assert str(caught.value).startswith(f"--tp {ranks} does not split the model's {words}")


def test_a_window_that_the_model_has_not(models) -> None:
    with pytest.raises(StartupError, match="--max-model-len 8192 is not possible: this model takes 1 to 4096"):
        plan(models["Llama-2-7B"], max_model_len=8192)
