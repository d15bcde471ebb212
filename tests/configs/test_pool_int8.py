"""Refusals of pools that weights in int8 alone would have room for: they say so, with the figures."""

from typing import Any

import published_models
import pytest

from configs.errors import SettingsError
from configs.model import GenerationDefaults
from configs.pool import Costs, Memory, size_pools
from configs.probed import LayerCall, ProbedConfig
from configs.setting_types import write_size
from configs.settings import Settings

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return published_models.sizes(tmp_path_factory.mktemp("models"), "SmolLM2-1.7B")


def costs_of(model: Any, **given: Any) -> tuple[Settings, Costs]:
    settings = Settings(**given)
    return settings, Costs.of(settings, model, "bfloat16")


def refusal(model: Any, memory: Memory, **given: Any) -> str:
    settings, costs = costs_of(model, **given)
    with pytest.raises(SettingsError) as refused:
        size_pools(settings, costs, memory)
    message = str(refused.value)
    assert message.endswith(".") and "\n" not in message and ". " not in message
    return message


def with_int8(model: Any, **given: Any) -> str:
    plain, int8 = costs_of(model, **given)[1], costs_of(model, quantization="int8", **given)[1]
    assert plain.int8_bytes == int8.weight_bytes < plain.weight_bytes and int8.int8_bytes is None
    sizes = f"{write_size(int8.weight_bytes)} of weights in place of {write_size(plain.weight_bytes)}"
    return f"; or give --quantization int8, with which it fits ({sizes}"


@pytest.mark.parametrize(
    ("size", "given", "cure"),
    [
        (2.5, {}, "free memory or give a smaller --model"),
        (4, {"kv_cache_memory_bytes": "1GiB"}, "lower --kv-cache-memory-bytes"),
        (6, {"gpu_memory_utilization": 0.5}, "raise --gpu-memory-utilization"),
        (
            3.95,
            {"kv_cache_dtype": "int8", "kv_refresh_interval": 1500, "max_model_len": 2000},
            "lower it, or raise --kv-cache-memory-bytes",
        ),
    ],
)
def test_each_refusal_that_int8_would_lift_says_so(model, size: float, given: dict[str, Any], cure: str) -> None:
    there = Memory(int(size * GIB), is_gpu=False)
    assert refusal(model, there, **given).endswith(f": {cure}{with_int8(model, **given)}).")
    settings, costs = costs_of(model, quantization="int8", **given)
    assert size_pools(settings, costs, there).num_blocks > 0


def test_on_a_gpu_with_what_speaks_against_it(model) -> None:
    given = {"max_num_seqs": 8, "max_model_len": 2048}
    message = refusal(model, Memory(int(3.9 * GIB), is_gpu=True), **given)
    assert message.endswith(f"--max-num-batched-tokens{with_int8(model, **given)}, in slower steps).")


@pytest.mark.parametrize(
    ("size", "given"), [(1, {}), (2.5, {"num_gpu_blocks_override": 10**6}), (1, {"quantization": "int8"})]
)
def test_where_it_would_not_help_nothing_is_said_of_it(model, size: float, given: dict[str, Any]) -> None:
    assert "--quantization" not in refusal(model, Memory(int(size * GIB), is_gpu=False), **given)


def test_a_pool_smaller_than_a_page_whatever_the_weights(model) -> None:
    assert "--quantization" not in refusal(model, Memory(8 * GIB, is_gpu=False), kv_cache_memory_bytes="1KiB")


def test_a_model_that_cannot_be_quantised() -> None:
    calls = (LayerCall(0, 8, 8, 64, None),)
    probed = ProbedConfig("X", 1000, None, GenerationDefaults(), (4096, 4096), calls, 10**9, 0)
    assert costs_of(probed)[1].int8_bytes is None
    assert "--quantization" not in refusal(probed, Memory(GIB, is_gpu=False))
