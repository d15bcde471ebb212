"""ModelConfig from config.json and generation_config.json: what is read, and every refusal."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VARIANTS, build, load_reference

from configs.errors import StartupError
from configs.kv import KVFormat, KVSpec, LayerKV
from configs.model import ModelConfig, RopeConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_source(folder)


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(StartupError) as caught:
        read(folder, {key: value for key, value in (BASE | changes).items() if value != "ABSENT"})
    message = str(caught.value)
    assert message.startswith("--model: ") and message.endswith(".") and "\n" not in message
    return message


# ------------------------------------------------------------------ reading
def test_old_style_config(tmp_path: Path) -> None:
    config = read(tmp_path, BASE)
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == (
        "LlamaForCausalLM",
        22,
        32,
        4,
    )
    assert (config.head_dim, config.max_position, config.rms_norm_eps, config.dtype) == (64, 2048, 1e-5, "bfloat16")
    assert config.rope == RopeConfig("none", 10000.0)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert config.sliding_window is None
    assert config.num_parameters == 1_100_048_384  # TinyLlama 1.1B


@pytest.mark.parametrize("name", VARIANTS)
def test_what_transformers_saves(name: str, tmp_path: Path) -> None:
    tiny = VARIANTS[name]
    config = ModelConfig.from_source(build(tmp_path, tiny))
    assert config.head_dim == (tiny.head_dim or tiny.hidden_size // tiny.num_heads)
    assert (config.hidden_size, config.vocab_size, config.num_kv_heads) == (64, 260, tiny.num_kv_heads)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (
        tiny.tied,
        tiny.attention_bias,
        tiny.mlp_bias,
    )
    kind = tiny.rope.get("rope_type", "default")
    assert config.rope.kind == ("none" if kind == "default" else kind)
    assert config.rope.theta == tiny.rope.get("rope_theta", 10000.0)
    assert config.rope.factor == tiny.rope.get("factor", 1.0)
    assert config.dtype == "float32"
    assert config.num_parameters == load_reference(tmp_path).num_parameters()


def test_old_rope_scaling_beside_rope_theta(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    assert read(tmp_path, BASE | {"rope_theta": 5e5, "rope_scaling": scaling}).rope == RopeConfig("linear", 5e5, 2.0)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = read(tmp_path, BASE | {"rope_theta": 5e5, "rope_scaling": llama3}).rope
    assert rope == RopeConfig("llama3", 5e5, 8.0, original_max_position=2048, low_freq_factor=1.0, high_freq_factor=4.0)
    assert read(tmp_path, BASE | {"rope_theta": 5e5, "rope_scaling": None}).rope == RopeConfig("none", 5e5)


def test_yarn_factor_follows_from_the_windows(tmp_path: Path) -> None:
    """As in DeepSeek's files, where `factor` is null."""
    rope = read(
        tmp_path,
        BASE | {"rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}},
    ).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 512)
    assert rope.attention_factor == pytest.approx(1.138629436)


def test_generation_defaults(tmp_path: Path) -> None:
    values = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 99,
    }
    generation = read(tmp_path, BASE, {"do_sample": True, **values}).generation
    assert {key: getattr(generation, key) for key in values} == values
    assert read(tmp_path, BASE, {}).generation.temperature is None
    assert read(tmp_path, BASE, {"do_sample": False, "temperature": 0.6}).generation.temperature == 0.0


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", 2.5), ("repetition_penalty", 0)]
)
def test_senseless_generation_defaults(key: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=rf"generation_config\.json: {key} must be .*, got {value}\."):
        read(tmp_path, BASE, {key: value})


# ------------------------------------------------------------------ arithmetic
def test_windows(tmp_path: Path) -> None:
    plain = read(tmp_path, BASE)
    assert (plain.window, plain.max_window, plain.effective_window(None), plain.effective_window(100)) == (
        2048,
        2048,
        2048,
        100,
    )
    dynamic = read(tmp_path, BASE | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert (dynamic.window, dynamic.max_window, dynamic.effective_window(8192)) == (2048, 8192, 8192)
    yarn = read(
        tmp_path,
        BASE | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
    )
    assert (yarn.window, yarn.max_window) == (8192, 8192)


def test_window_too_large(tmp_path: Path) -> None:
    config = read(tmp_path, BASE)
    for wanted in (2049, 0):
        with pytest.raises(
            StartupError, match=rf"--max-model-len {wanted} is not possible: this model takes 1 to 2048 "
        ):
            config.effective_window(wanted)


def test_sliding_window_caps_the_window(tmp_path: Path) -> None:
    mistral = BASE | {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    config = read(tmp_path, mistral | {"sliding_window": 4096})
    assert (config.window, config.max_window) == (4096, 4096)
    with pytest.raises(StartupError, match=r"--max-model-len 8192 .* 4096 tokens \(its sliding window\)"):
        config.effective_window(8192)
    assert read(tmp_path, mistral | {"sliding_window": None}).window == 32768
    assert read(tmp_path, mistral | {"sliding_window": 100_000}).window == 32768


def test_kv_layers(tmp_path: Path) -> None:
    config = read(tmp_path, BASE)
    assert config.kv_layers(KVFormat.BF16) == (LayerKV(4, 64, KVFormat.BF16),) * 22
    assert KVSpec(config.kv_layers(KVFormat.BF16), 16).bytes_per_token == 2 * 22 * 4 * 64 * 2


def test_weight_bytes_count_a_packed_head(tmp_path: Path) -> None:
    untied, tied = read(tmp_path, BASE), read(tmp_path, BASE | {"tie_word_embeddings": True})
    assert untied.weight_bytes("bfloat16") == tied.weight_bytes("bfloat16") == 2 * untied.num_parameters
    assert tied.num_parameters == untied.num_parameters - 32000 * 2048
    assert untied.weight_bytes("float32") == 2 * untied.weight_bytes("float16")


def test_reading_a_config_loads_no_torch(tmp_path: Path) -> None:
    read(tmp_path, BASE)
    code = (
        "import sys, pathlib; from configs.model import ModelConfig; "
        "ModelConfig.from_source(pathlib.Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "config.json: num_attention_heads must be an integer of at least 1, got 0"),
        ({"num_attention_heads": "32"}, "num_attention_heads must be an integer of at least 1, got '32'"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer of at least 1, got True"),
        ({"num_attention_heads": [4, 8]}, "num_attention_heads must be one number for all layers, got [4, 8]"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must be a divisor of the 32 attention heads, got 5"),
        ({"hidden_size": 2047}, "hidden_size must be a multiple of the 32 attention heads"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"hidden_size": "ABSENT"}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"max_position_embeddings": -1}, "max_position_embeddings must be an integer of at least 1, got -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0, got 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"torch_dtype": "int8"}, "torch_dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1, got 1.0"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling: type must be one of none, linear, llama3, yarn, dynamic",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1, got 0.5"),
        ({"rope_scaling": {"type": "divisors"}}, "divisors is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be a mapping, got [1]"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters must be the same for all layers",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor must be above low_freq_factor (4), got 4",
        ),
    ],
)
def test_senseless_values(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, **changes)
    assert words in message and str(tmp_path) in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "has GPT2LMHeadModel, which is not supported"),
        ({"architectures": None, "model_type": "mamba"}, "has mamba, which is not supported"),
        ({"architectures": None}, "has no architecture, which is not supported"),
        ({"architectures": [["LlamaForCausalLM"]]}, "has ['LlamaForCausalLM'], which is not supported"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
            "(MixtralForCausalLM): mixtures of experts",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "multi-head latent attention"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder models"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"depth": 2}}, "images or sound"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "its weights are quantised (awq)"),
        ({"quantization_config": {"quant_method": "gptq"}}, "its weights are quantised (gptq)"),
    ],
)
def test_what_is_not_supported_says_what_is(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, **changes)
    assert words in message
    assert "Supported are LlamaForCausalLM, MistralForCausalLM and GGUF files of llama." in message


def test_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"holds no config\.json, so it is not a model folder"):
        ModelConfig.from_source(tmp_path)
    with pytest.raises(StartupError, match="nowhere does not exist"):
        ModelConfig.from_source(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "", "[1]", "\x00"])
def test_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=r"config\.json (cannot be read as JSON|must hold a JSON object)"):
        ModelConfig.from_source(tmp_path)


rope_values = st.dictionaries(
    st.sampled_from(["type", "rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "divisors"]),
    st.sampled_from(["linear", "yarn", "llama3", "dynamic", "divisors", 0, 1, 2.5, None, [], "x"]),
)
json_values = rope_values | (
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
)


@settings(deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*BASE, "rope_scaling", "rope_theta", "head_dim"]), json_values))
def test_any_config_is_read_or_refused(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """No value makes anything but a StartupError."""
    folder = tmp_path_factory.getbasetemp()
    try:
        config = read(folder, BASE | changes)
    except StartupError as error:
        assert "--model" in str(error)
    else:
        assert config.num_heads % config.num_kv_heads == 0 and config.num_parameters > 0
