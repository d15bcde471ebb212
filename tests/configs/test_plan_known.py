"""Known answers: what published models keep of a token, in numbers that anybody can check by hand."""

from dataclasses import replace
from pathlib import Path

import published_models
import pytest

from configs.decoder import DecoderConfig
from configs.kv import KVFormat, KVLayout, KVSpec
from configs.plan_costs import payload_bytes
from configs.plan_model import rank_of

BF16_TABLE: dict[str, tuple[int, int, str, str]] = {
    "Llama-2-7B": (524_288, 8_192, "2.147", "17.18"),
    "Llama-2-13B": (819_200, 12_800, "3.355", "26.84"),
    "Llama-2-70B": (327_680, 5_120, "1.342", "10.74"),
    "Llama-3.1-70B": (327_680, 5_120, "1.342", "10.74"),
    "Llama-3.1-8B": (131_072, 2_048, "0.537", "4.29"),
    "Llama-3.2-1B": (32_768, 512, "0.134", "1.07"),
    "Llama-3.2-3B": (114_688, 1_792, "0.470", "3.76"),
    "TinyLlama-1.1B": (22_528, 352, "0.092", "0.74"),
    "Mistral-7B-v0.3": (131_072, 2_048, "0.537", "4.29"),
    "Mistral-Nemo-12B": (163_840, 2_560, "0.671", "5.37"),
    "Mistral-Small-24B": (163_840, 2_560, "0.671", "5.37"),
    "Qwen2.5-0.5B": (12_288, 192, "0.050", "0.40"),
    "Qwen2.5-1.5B": (28_672, 448, "0.117", "0.94"),
    "Qwen2.5-3B": (36_864, 576, "0.151", "1.21"),
    "Qwen2.5-7B": (57_344, 896, "0.235", "1.88"),
    "Qwen2.5-14B": (196_608, 3_072, "0.805", "6.44"),
    "Qwen2.5-32B": (262_144, 4_096, "1.074", "8.59"),
    "Qwen2.5-72B": (327_680, 5_120, "1.342", "10.74"),
    "Qwen3-0.6B": (114_688, 1_792, "0.470", "3.76"),
    "Qwen3-1.7B": (114_688, 1_792, "0.470", "3.76"),
    "Qwen3-4B": (147_456, 2_304, "0.604", "4.83"),
    "Qwen3-8B": (147_456, 2_304, "0.604", "4.83"),
    "Qwen3-14B": (163_840, 2_560, "0.671", "5.37"),
    "Qwen3-32B": (262_144, 4_096, "1.074", "8.59"),
    "Qwen3-30B-A3B": (98_304, 1_536, "0.403", "3.22"),
    "Qwen3-235B-A22B": (192_512, 3_008, "0.789", "6.31"),
    "SmolLM2-135M": (23_040, 360, "0.094", "0.75"),
    "SmolLM2-360M": (40_960, 640, "0.168", "1.34"),
    "SmolLM2-1.7B": (196_608, 3_072, "0.805", "6.44"),
    "Gemma-2-2B": (106_496, 1_664, "0.436", "3.49"),
    "Gemma-2-9B": (344_064, 5_376, "1.409", "11.27"),
    "Gemma-2-27B": (376_832, 5_888, "1.544", "12.35"),
    "Gemma-3-270M": (18_432, 288, "0.075", "0.60"),
    "Gemma-3-1B": (26_624, 416, "0.109", "0.87"),
    "Gemma-3-4B": (139_264, 2_176, "0.570", "4.56"),
    "Gemma-3-12B": (393_216, 6_144, "1.611", "12.88"),
    "Gemma-3-27B": (507_904, 7_936, "2.080", "16.64"),
    "Phi-4-14B": (204_800, 3_200, "0.839", "6.71"),
}
"""Bytes a token, KiB a page of 16 tokens, GB (10^9 bytes) of 4,096 and 32,768 tokens; every layer sees everything."""
PARAMETERS = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-135M": 134_515_008,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Phi-4-14B": 14_659_507_200,
}
"""What model cards and safetensors' metadata say."""


@pytest.mark.parametrize("name", BF16_TABLE)
def test_bf16_column(name: str, tmp_path: Path) -> None:
    model = published_models.sizes(tmp_path, name)
    assert isinstance(model, DecoderConfig) == (name in published_models.OURS)
    layers = tuple(replace(layer, window=None) for layer in model.kv_layers(KVFormat.BF16))
    layout = KVLayout.of(layers, 16)
    per_token, page_kib, gb_4k, gb_32k = BF16_TABLE[name]
    assert layout.bytes_per_token == per_token
    assert layout.block_bytes == page_kib * 1024
    assert f"{payload_bytes(layout, 4096) / 1e9:.3f}" == gb_4k
    assert f"{payload_bytes(layout, 32768) / 1e9:.2f}" == gb_32k


def test_the_table_is_whole() -> None:
    assert BF16_TABLE.keys() == published_models.OURS.keys() | published_models.OTHERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_numbers_of_parameters(name: str, tmp_path: Path) -> None:
    model = published_models.sizes(tmp_path, name)
    assert model.num_parameters == PARAMETERS[name]


def gb(name: str, tokens: int, folder: Path) -> float:
    model = published_models.sizes(folder, name)
    return payload_bytes(KVLayout.of(model.kv_layers(KVFormat.BF16), 16), tokens) / 1e9


def test_windows_make_gemma_small(tmp_path: Path) -> None:
    """10 of the 27B's 62 layers see everything, the others 1,024 tokens; 8 of the 12B's 48; half of Gemma 2's 4,096."""
    assert f"{gb('Gemma-3-27B', 32768, tmp_path):.2f}" == "3.12"
    assert f"{gb('Gemma-3-12B', 32768, tmp_path):.2f}" == "2.48"
    assert f"{gb('Gemma-2-9B', 8192, tmp_path):.2f}" == "2.11"


@pytest.mark.parametrize(
    ("name", "ranks", "per_token", "times"),
    [
        ("Llama-3.1-70B", 8, 40_960, 1.0),
        ("Llama-3.1-70B", 16, 40_960, 2.0),
        ("Qwen2.5-7B", 4, 14_336, 1.0),
        ("Qwen2.5-7B", 28, 14_336, 7.0),
        ("Qwen2.5-3B", 8, 18_432, 4.0),
        ("Llama-2-7B", 8, 65_536, 1.0),
    ],
)
def test_more_gpus_than_kv_heads_keep_heads_several_times(
    name: str, ranks: int, per_token: int, times: float, tmp_path: Path
) -> None:
    model = published_models.sizes(tmp_path, name)
    whole, rank = (KVSpec(each.kv_layers(KVFormat.BF16), 16) for each in (model, rank_of(model, ranks)))
    assert rank.bytes_per_token == per_token
    assert ranks * rank.bytes_per_token / whole.bytes_per_token == times


def test_a_part_of_a_model_has_a_part_of_its_weights(tmp_path: Path) -> None:
    model = published_models.sizes(tmp_path, "Llama-3.1-70B")
    norms = model.hidden_size * (2 * model.num_layers + 1) * 2
    parts = 8 * rank_of(model, 8).weight_bytes("bfloat16")
    assert parts - model.weight_bytes("bfloat16") == 7 * norms, "norms are on every GPU, all else on one"
