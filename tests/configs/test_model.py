"""DecoderConfig from config.json and generation_config.json: what is read, and every refusal."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VARIANTS, build, load_reference

from configs.decoder import FAMILIES, DecoderConfig
from configs.errors import StartupError
from configs.kv import KVFormat, KVSpec, LayerKV
from configs.model import MAX_WINDOW, ModelConfig
from configs.model_rope import RopeConfig
from configs.supported import read_model
from engine.model.layers.linear import Linear
from engine.model.registry import load_model

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


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model(folder)


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
    assert not (config.tie_word_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    assert config.layer_windows == (None,) * 22 and config.local_rope is None and config.attention_scale == 0.125
    assert config.num_parameters == 1_100_048_384  # TinyLlama 1.1B


@pytest.mark.parametrize("name", VARIANTS)
def test_what_transformers_saves(name: str, tmp_path: Path) -> None:
    tiny = VARIANTS[name]
    config = read_model(build(tmp_path, tiny))
    assert config.head_dim == (tiny.head_dim or tiny.hidden_size // tiny.num_heads)
    assert (config.hidden_size, config.vocab_size, config.num_kv_heads) == (64, 260, tiny.num_kv_heads)
    assert config.tie_word_embeddings == tiny.tied
    rope = tiny.rope.get("full_attention", tiny.rope)
    kind = rope.get("rope_type", "default")
    assert config.rope.kind == ("none" if kind == "default" else kind)
    assert config.rope.theta == rope.get("rope_theta", 10000.0)
    assert config.rope.factor == rope.get("factor", 512 / config.rope.original_max_position if "phi3-" in name else 1.0)
    assert config.dtype == "float32"


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_counted_as_transformers_does(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path, VARIANTS[name])
    config, reference = read_model(folder), load_reference(folder)
    assert config.num_parameters == reference.num_parameters()
    norms = sum(p.numel() for n, p in reference.named_parameters() if n.endswith("norm.weight"))
    expected = 2 * config.num_parameters + (2 * 260 * 64 if config.tie_word_embeddings else 0)
    assert config.weight_bytes("bfloat16") == expected + (2 * norms if config.zero_centred_norms else 0)
    with torch.no_grad():
        model = load_model(folder, config, torch.bfloat16, 256, lambda fraction: None)
    buffers = sum(b.nbytes for n, b in model.named_buffers() if "rotary" not in n)
    matrices = [m for m in model.modules() if isinstance(m, Linear)]
    packed = sum(m.in_features * m.out_features + m.has_bias * m.out_features for m in matrices)
    assert buffers + 2 * packed == config.weight_bytes("bfloat16")
    weights = sum(m.in_features * m.out_features for m in matrices)
    scales = sum(m.out_features for m in matrices)
    assert config.weight_bytes("bfloat16", "int8") == config.weight_bytes("bfloat16") - weights + 4 * scales


def test_families(tmp_path: Path) -> None:
    """What each adds to Llama, from the config.json that its authors published, shortened."""
    qwen2 = BASE | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024, "max_window_layers": 20}
    config = read(tmp_path, qwen2 | {"use_sliding_window": False})
    assert (config.qkv_bias, config.o_bias, config.layer_windows) == (True, False, (None,) * 22)
    config = read(tmp_path, qwen2 | {"use_sliding_window": True})
    assert config.layer_windows == (None,) * 20 + (1024,) * 2

    qwen3 = BASE | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
    config = read(tmp_path, qwen3 | {"head_dim": 80})
    assert (config.qk_norm, config.qkv_bias, config.head_dim, config.attention_scale) == (True, False, 80, 80**-0.5)
    assert read(tmp_path, qwen3).head_dim == 128, "its class's default, not the hidden size over the heads"

    phi3 = BASE | {"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047}
    config = read(tmp_path, phi3)
    assert (config.layer_windows, config.rotary_dim, config.rope.kind) == ((2047,) * 22, 64, "none")
    factors = {"short_factor": [1.0] * 24, "long_factor": [2] * 24}
    windows = {"max_position_embeddings": 131072, "original_max_position_embeddings": 2048, "sliding_window": 262144}
    mini = phi3 | windows | {"partial_rotary_factor": 0.75}
    for kind in ("longrope", "su", "yarn"):
        config = read(tmp_path, mini | {"rope_scaling": {"type": kind, **factors}})
        assert (config.layer_windows, config.rotary_dim) == ((None,) * 22, 48)
        assert (config.rope.kind, config.rope.original_max_position, config.rope.factor) == ("longrope", 2048, 64.0)
        assert (config.rope.divisors, config.rope.long_divisors) == ((1.0,) * 24, (2.0,) * 24)
        assert config.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(64) / math.log(2048)))

    gemma = BASE | {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 168,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 512,
    }
    config = read(tmp_path, gemma | {"sliding_window_pattern": 6})
    assert config.layer_windows == ((512,) * 5 + (None,)) * 3 + (512,) * 4
    assert (config.rope, config.local_rope) == (RopeConfig("linear", 1e6, 8.0), RopeConfig("none", 20000.0))
    assert config.activation == "gelu_tanh" and config.qk_norm and config.post_norms and config.zero_centred_norms
    assert (config.attention_scale, config.embedding_scale, config.tie_word_embeddings) == (168**-0.5, 2048**0.5, True)
    kinds = ["full_attention", "sliding_attention"] * 11
    assert read(tmp_path, gemma | {"layer_types": kinds}).layer_windows == (None, 512) * 11


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


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_a_window_that_nothing_is_made_for(family: str, tmp_path: Path) -> None:
    """Tables of all its positions would take all memory; where every layer has a sliding window, no pool bounds it."""
    config = read(tmp_path, BASE | {"architectures": [family], "max_position_embeddings": 10**9})
    with pytest.raises(StartupError) as caught:
        config.effective_window(None)
    assert str(caught.value) == (
        f"--model: the window that it declares, 1000000000 tokens, is too long: at most {MAX_WINDOW} are served; say "
        "how many with --max-model-len."
    )
    assert config.effective_window(MAX_WINDOW) == MAX_WINDOW
    with pytest.raises(
        StartupError, match=rf"^--max-model-len {MAX_WINDOW + 1} is not possible: .* 1 to {MAX_WINDOW} "
    ):
        config.effective_window(MAX_WINDOW + 1)


def test_sliding_window_does_not_cap_the_context(tmp_path: Path) -> None:
    mistral = BASE | {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    config = read(tmp_path, mistral | {"sliding_window": 4096})
    assert (config.window, config.max_window, config.layer_windows) == (32768, 32768, (4096,) * 22)
    assert read(tmp_path, mistral).layer_windows == (4096,) * 22, "its class's default"
    assert read(tmp_path, mistral | {"sliding_window": None}).layer_windows == (None,) * 22
    assert read(tmp_path, mistral | {"sliding_window": 32768}).layer_windows == (None,) * 22, "nothing lies beyond it"


def test_kv_layers(tmp_path: Path) -> None:
    config = read(tmp_path, BASE)
    assert config.kv_layers(KVFormat.BF16) == (LayerKV(4, 64, KVFormat.BF16),) * 22
    config = read(tmp_path, BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 512})
    assert config.kv_layers(KVFormat.BF16) == (LayerKV(4, 64, KVFormat.BF16, 512),) * 22
    assert KVSpec(config.kv_layers(KVFormat.BF16), 16).bytes_per_token == 2 * 22 * 4 * 64 * 2


def test_weight_bytes_count_a_packed_head(tmp_path: Path) -> None:
    untied, tied = read(tmp_path, BASE), read(tmp_path, BASE | {"tie_word_embeddings": True})
    assert untied.weight_bytes("bfloat16") == tied.weight_bytes("bfloat16") == 2 * untied.num_parameters
    assert tied.num_parameters == untied.num_parameters - 32000 * 2048
    assert untied.weight_bytes("float32") == 2 * untied.weight_bytes("float16")
    for config in (untied, tied):
        linear = 2048 * (22 * (2048 + 256 + 256 + 2048 + 3 * 5632) + 32000)
        outputs = 22 * (2560 + 2048 + 2 * 5632 + 2048) + 32000
        rest = 32000 * 2048 + 45 * 2048
        assert config.weight_bytes("bfloat16", "int8") == linear + 4 * outputs + 2 * rest
        assert config.weight_bytes("float32", "int8") == linear + 4 * outputs + 4 * rest


def test_reading_a_config_loads_no_torch(tmp_path: Path) -> None:
    read(tmp_path, BASE)
    code = (
        "import sys, pathlib; from configs.supported import read_model; "
        "read_model(pathlib.Path(sys.argv[1])); assert 'torch' not in sys.modules"
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
        ({"max_position_embeddings": -1}, "max_position_embeddings must be an integer of at least 2, got -1"),
        ({"max_position_embeddings": 1}, "max_position_embeddings must be an integer of at least 2, got 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0, got 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu or gelu_pytorch_tanh, got 'gelu'"),
        ({"torch_dtype": "int8"}, "torch_dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1, got 1.0"),
        (
            {"rope_scaling": {"type": "mrope"}},
            "rope_scaling: type must be one of default, linear, dynamic, llama3, yarn, longrope, su, got 'mrope'",
        ),
        (
            {"rope_scaling": {"rope_type": "divisors", "divisors": [1.0] * 32}},
            "rope_type must be one of default, linear, dynamic, llama3, yarn, longrope, su, got 'divisors'",
        ),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling: short_factor is missing; it must be 32",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 31 + [0.0], "long_factor": [1] * 32}},
            "short_factor must be 32 positive numbers, got [1.0, ",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.55},
            "partial_rotary_factor must be an even part of a head's 64 dims, got 0.55",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            "final_logit_softcapping must be absent, as it is not supported, got 30.0",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention must be absent, as it is not supported, got True",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention", "linear_attention"] * 11},
            "layer_types must be a list of 22 times full_attention or sliding_attention, got ['full_attention', ",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window must be an integer of at",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1, got 0.5"),
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
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1, got 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads (32), got 3"),
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1, got 0"),
        ({"intermediate_size": 10**20}, f"intermediate_size must be at most {2**31 - 1}, got {10**20}"),
        ({"max_position_embeddings": 10**18}, f"max_position_embeddings must be at most {2**31 - 1}"),
        ({"n_embd": "wide"}, "n_embd must be an integer of at least 1, got 'wide'"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number, got inf"),
        ({"architectures": "OtherForCausalLM"}, "architectures must be a list of names, got 'OtherForCausalLM'"),
        ({"architectures": [5]}, "architectures must be a list of names, got [5]"),
    ],
)
def test_senseless_values_of_other_architectures(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, **{"architectures": ["OtherForCausalLM"], **changes})
    assert words in message and str(tmp_path) in message


def test_a_window_of_0_that_is_not_used(tmp_path: Path) -> None:
    """As transformers saves Qwen2-MoE."""
    config = {"architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 99, "sliding_window": 0}
    assert read(tmp_path, config | {"use_sliding_window": False}).vocab_size == 99
    with pytest.raises(StartupError, match="sliding_window must be"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": 8}, "(LlamaForCausalLM): mixtures of experts"),
        ({"architectures": ["OtherForCausalLM"], "num_hidden_layers": 10**9}, "1000000000 layers are too many"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers are too many"),
        ({"architectures": ["GPT2LMHeadModel"], "n_layer": 200000}, "200000 layers are too many"),
        ({"architectures": ["\ud800"], "is_encoder_decoder": True}, "(?): encoder-decoder models"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "multi-head latent attention"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder models"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"depth": 2}}, "images or sound"),
        ({"architectures": ["JambaForCausalLM"], "layers_block_type": ["mamba", "attention"]}, "the kind mamba"),
        ({"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention"]}, "the kind linear_attention"),
        ({"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 15}, "share keys and values"),
    ],
)
def test_what_is_not_supported_says_what_is(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, **changes)
    assert words in message
    supported = (
        "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Phi3ForCausalLM, Gemma3ForCausalLM"
    )
    assert f"Supported are {supported}, GGUF files of llama, qwen2, qwen3, phi3, gemma3, and" in message


def test_of_other_architectures_the_files_are_not_asked_more(tmp_path: Path) -> None:
    config = read(tmp_path, {"architectures": ["OlmoForCausalLM"], "vocab_size": 99}, {"top_k": 7})
    assert type(config) is ModelConfig and (config.architecture, config.vocab_size) == ("OlmoForCausalLM", 99)
    assert config.generation.top_k == 7 and config.dtype is None
    assert read(tmp_path, {"model_type": "olmo", "vocab_size": 99}).architecture == "olmo"
    with pytest.raises(StartupError, match=r"vocab_size is missing"):
        read(tmp_path, {"model_type": "olmo"})


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_quantised_weights_are_the_wrong_files(method: str, tmp_path: Path) -> None:
    """The architecture is served, so no list of architectures follows."""
    message = refusal(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    assert f"its weights are quantised ({method}): take the bf16" in message and "Supported are" not in message


def test_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"holds no config\.json, so it is not a model folder"):
        read_model(tmp_path)
    with pytest.raises(StartupError, match="nowhere does not exist"):
        read_model(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "", "[1]", "\x00", "[" * 10**5, '{"a":' * 10**5], ids=lambda text: text[:5])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_config_that_is_no_json_object(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / name).write_text(text)
    with pytest.raises(StartupError, match=rf"/{name} (cannot be read as JSON|must hold a JSON object)") as caught:
        read_model(tmp_path)
    assert ("nested too deeply" in str(caught.value)) == (len(text) > 5)


@pytest.mark.parametrize("depth", [1, 500, 900])
def test_a_value_that_cannot_be_shown_in_full(depth: int, tmp_path: Path) -> None:
    """Long ones are cut; what Python can read, and no longer write, is named by its kind."""
    for inner in ("1", "1, " * 10**4 + "1"):
        text = json.dumps(BASE).replace('"hidden_size": 2048', f'"hidden_size": {"[" * depth}{inner}{"]" * depth}')
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(
            StartupError, match=r"hidden_size must be an integer of at least 1, got |nested too"
        ) as caught:
            read_model(tmp_path)
        assert len(str(caught.value)) < 1000


rope_values = st.dictionaries(
    st.sampled_from(
        ["type", "rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "divisors",
         "short_factor", "long_factor", "partial_rotary_factor", "full_attention", "sliding_attention"]
    ),
    st.sampled_from(
        ["linear", "yarn", "llama3", "dynamic", "divisors", "longrope", "su", 0, 1, 2.5, None, [], [1] * 32, {}, "x"]
    ),
)  # fmt: skip
OWN_KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "head_dim", "sliding_window", "layer_types",
            "use_sliding_window", "partial_rotary_factor", "rope_local_base_freq", "sliding_window_pattern",
            "query_pre_attn_scalar", "max_window_layers")  # fmt: skip
json_values = rope_values | (
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
)


@settings(deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(st.sampled_from([*BASE, *OWN_KEYS]), json_values, max_size=4),
)
def test_any_config_is_read_or_refused(
    family: str, changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No value makes anything but a StartupError."""
    folder = tmp_path_factory.getbasetemp()
    try:
        config = read(folder, BASE | {"architectures": [family]} | changes)
    except StartupError as error:
        assert "--model" in str(error)
    else:
        if changes.get("architectures", [family]) != [family]:
            assert type(config) is ModelConfig
            return
        assert config.num_heads % config.num_kv_heads == 0 and config.num_parameters > 0
        assert len(config.layer_windows) == config.num_layers
