"""What is read off a class of transformers without weights, and every refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from own_code import own_model
from tiny_models import FALLBACKS, build, quiet

from configs.kv import KVFormat
from engine.errors import StartupError
from engine.model.fallback.config import TransformersConfig
from engine.model.registry import read_config

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def config_of(folder: Path, kind: str, **values: Any) -> Path:
    """A folder with the config.json that transformers writes; there are no weights."""
    with quiet():
        config = transformers.AutoConfig.for_model(kind, **{**SIZES, **values})
        name = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        config.architectures = [name]
        config.save_pretrained(folder)
    return folder


def change(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def read(folder: Path) -> TransformersConfig:
    config = read_config(folder, trust_remote_code=False)
    assert isinstance(config, TransformersConfig)
    return config


def refusal(folder: Path) -> str:
    with pytest.raises(StartupError) as caught:
        read_config(folder, trust_remote_code=False)
    message = str(caught.value)
    assert message.startswith("--model: ") and "\n" not in message and "Supported are LlamaForCausalLM" in message
    return message


@pytest.mark.parametrize("name", sorted(FALLBACKS))
def test_sizes_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    config = read(build(tmp_path, FALLBACKS[name]))
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    tied = FALLBACKS[name].tied
    assert config.num_parameters == numbers and config.vocab_size == 260 and config.window == config.max_window == 512
    assert config.weight_bytes("bfloat16") == 2 * (numbers + tied * model.get_input_embeddings().weight.numel())
    layers = config.kv_layers(KVFormat.BF16)
    assert [(layer.kv_heads, layer.head_dim) for layer in layers] == [(FALLBACKS[name].num_kv_heads, 16)] * len(layers)


def test_windows_by_layer(tmp_path: Path) -> None:
    layers = read(build(tmp_path, FALLBACKS["cohere2"])).kv_layers(KVFormat.FP32)
    assert [layer.window for layer in layers] == [24, None, 24]


def test_a_window_that_no_text_exceeds_is_none(tmp_path: Path) -> None:
    layers = read(config_of(tmp_path, "cohere2", sliding_window=256)).kv_layers(KVFormat.FP32)
    assert [layer.window for layer in layers] == [None, None]


@pytest.mark.parametrize(("kind", "stretched"), [("linear", 1024), ("dynamic", 1024), ("llama3", 256)])
def test_window_that_may_be_asked_for(kind: str, stretched: int, tmp_path: Path) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **(more if kind == "llama3" else {})}
    config = read(config_of(tmp_path, "olmo2", rope_parameters=rope))
    assert (config.window, config.max_window) == (256, stretched)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("bloom", {}, "BloomForCausalLM has no attention that can be replaced"),
        ("mamba", {}, "MambaForCausalLM has no attention that can be replaced: it keeps another state"),
        (
            "diffllama",
            {},
            "each of its 2 layers would have to use attention once, over keys and values of its own; it is used 4",
        ),
        ("doge", {}, "it needs attention with attention_mask"),
        ("nemotron", {}, "(its layers do not hand on what attention needs)"),
        ("deepseek_v2", {}, "multi-head latent attention is not supported (it has a kv_lora_rank)"),
        ("minimax", {}, "layers of the kind linear_attention are not supported"),
        ("bart", {}, "encoder-decoder models are not supported"),
    ],
)
def test_refusals(kind: str, values: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(config_of(tmp_path, kind, **values))


def test_defaults_of_the_class_are_checked_too(tmp_path: Path) -> None:
    """config.json need not say what the class assumes."""
    folder = config_of(tmp_path, "deepseek_v2")
    values = json.loads((folder / "config.json").read_text())
    del values["kv_lora_rank"]
    (folder / "config.json").write_text(json.dumps(values))
    assert "multi-head latent attention" in refusal(folder)


def test_weights_of_another_task(tmp_path: Path) -> None:
    folder = change(config_of(tmp_path, "olmo2"), architectures=["Olmo2ForSequenceClassification"])
    assert "of another task; text is generated with Olmo2ForCausalLM" in refusal(folder)


def test_a_window_that_stands_in_masks_alone(tmp_path: Path) -> None:
    """PhiMoE hands it to no attention function."""
    assert "its window of 100 tokens stands in masks alone" in refusal(
        config_of(tmp_path, "phimoe", sliding_window=100)
    )
    assert read(config_of(tmp_path, "phimoe", sliding_window=256)).max_window == 256


def test_a_scaled_window_by_yarn(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
    assert read(config_of(tmp_path, "olmo2", rope_parameters=rope)).windows == (1024, 1024)


def test_model_types_that_are_none(tmp_path: Path) -> None:
    folder = change(config_of(tmp_path, "olmo2"), model_type=["olmo2"])
    assert "does not have it" in refusal(folder)


def test_code_of_another_repository(tmp_path: Path) -> None:
    own = {"AutoConfig": "some/other--own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = change(config_of(tmp_path, "olmo2"), model_type="own", auto_map=own, architectures=["OwnForCausalLM"])
    with pytest.raises(StartupError, match="its code is in another repository"):
        read_config(folder, trust_remote_code=True)


def test_transformers_bars_and_warnings_are_as_before(tmp_path: Path) -> None:
    from transformers.utils import logging

    folder = config_of(tmp_path, "olmo2")
    logging.enable_progress_bar()
    level = logging.get_verbosity()
    read(folder)
    assert logging.is_progress_bar_enabled() and logging.get_verbosity() == level
    logging.disable_progress_bar()


def test_older_name_of_a_class(tmp_path: Path) -> None:
    assert read(change(config_of(tmp_path, "olmo2"), architectures=["OLMo2LMForCausalLM"])).num_parameters > 0


def test_unknown_to_the_library(tmp_path: Path) -> None:
    folder = change(config_of(tmp_path, "olmo2"), model_type="olmo9", architectures=["Olmo9ForCausalLM"])
    assert f"transformers {transformers.__version__} does not have it" in refusal(folder)


def test_code_of_its_own_is_not_run_unasked(tmp_path: Path) -> None:
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    folder = change(config_of(tmp_path, "olmo2"), model_type="own", auto_map=own, architectures=["OwnForCausalLM"])
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    assert "--trust-remote-code" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_experts_per_tok must be at most num_local_experts (0), got 2"),
        ("mixtral", {"num_local_experts": -1}, "num_local_experts must be an integer of at least 0, got -1"),
        ("gpt_oss", {"num_experts_per_tok": -1}, "num_experts_per_tok must be an integer of at least 1, got -1"),
        ("gpt_oss", {"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer of at least 1, got 0"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok must be at most num_local_experts (4), got 5"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0, got 0"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be at least 0, got -1"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be at least 0, got -1.0"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping must be above 0, got 0.0"),
        ("granite_swa", {"attention_multiplier": 0}, "attention_multiplier must be above 0, got 0"),
        ("granite_swa", {"attention_multiplier": -1}, "attention_multiplier must be at least 0, got -1"),
        ("gpt2", {"n_positions": 1}, "n_positions must be an integer of at least 2, got 1"),
        ("olmo2", {"max_position_embeddings": 1}, "max_position_embeddings must be an integer of at least 2, got 1"),
    ],
)
def test_numbers_that_no_layer_can_work_with(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Named with their key, where the library would fail in the middle of its code."""
    folder = build(tmp_path, FALLBACKS[name])
    read(folder)
    with pytest.raises(StartupError) as caught:
        read_config(change(folder, **changes), trust_remote_code=False)
    assert str(caught.value) == f"--model: {folder / 'config.json'}: {words}."


def test_defaults_of_the_class_count_too(tmp_path: Path) -> None:
    """Of a key that config.json leaves out; and layers without experts choose none."""
    folder = config_of(tmp_path, "mixtral", num_local_experts=1, num_experts_per_tok=1)
    values = json.loads((folder / "config.json").read_text())
    del values["num_experts_per_tok"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(StartupError, match=r"num_experts_per_tok must be at most num_local_experts \(1\), got 2"):
        read_config(folder, trust_remote_code=False)
    kinds = {"layer_types": ["attention", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0}
    assert read(config_of(tmp_path / "dense", "granitemoehybrid", **kinds)).num_parameters > 0


@pytest.mark.parametrize(
    ("scaling", "softcap", "words"),
    [
        ("0", "None", "scores of attention multiplied by 0"),
        ("-0.5", "None", "scores of attention multiplied by -0.5"),
        ("float('nan')", "None", "scores of attention multiplied by nan"),
        ("(-1) ** -0.5", "None", "scores of attention multiplied by (6.1"),
        ("0.5", "-2.0", "scores of attention capped at -2.0"),
        ("0.5", "float('inf')", "scores of attention capped at inf"),
    ],
)
def test_what_layers_ask_of_scores_is_looked_at(scaling: str, softcap: str, words: str, tmp_path: Path) -> None:
    """Whatever the key that it comes from."""
    folder = own_model(tmp_path)
    code = (folder / "own.py").read_text()
    asked = "scaling=q.shape[-1] ** -0.5"
    assert asked in code
    (folder / "own.py").write_text(code.replace(asked, f"scaling={scaling}, softcap={softcap}"))
    with pytest.raises(StartupError) as caught:
        read_config(folder, trust_remote_code=True)
    assert f"it needs {words}" in str(caught.value) and "which must be a number above 0" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("cohere2", {"attention_bias": "yes"}, "Field 'attention_bias' expected bool, got str (value: 'yes')"),
        ("olmo2", {"hidden_act": 5}, "Field 'hidden_act' expected str, got int (value: 5)"),
        ("gemma2", {"hidden_size": 66}, "The hidden size (66) is not a multiple of the number of attention heads (4)"),
    ],
)
def test_what_the_library_says_of_a_value_is_passed_on(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    message = refusal(change(config_of(tmp_path, kind), **changes))
    assert "cannot read its configuration (" in message and f"Error: {words})" in message


@pytest.mark.parametrize(("key", "value"), [("factor", "x"), ("factor", 0), ("original_max_position_embeddings", [1])])
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_senseless_scalings(name: str, key: str, value: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    folder = change(config_of(tmp_path, "olmo2"), **{"rope_parameters": None, name: rope | {key: value}})
    with pytest.raises(StartupError, match=rf"config\.json: {name}: {key} must be "):
        read_config(folder, trust_remote_code=False)


def test_senseless_sizes(tmp_path: Path) -> None:
    assert "max_position_embeddings" in refusal(change(config_of(tmp_path, "olmo2"), max_position_embeddings=None))
    with pytest.raises(StartupError, match=r"num_hidden_layers must be an integer of at least 1, got 0"):
        read_config(change(tmp_path, num_hidden_layers=0), trust_remote_code=False)


def test_nothing_is_allocated(tmp_path: Path) -> None:
    """A model of 10^13 numbers."""
    config = read(config_of(tmp_path, "olmo2", hidden_size=2**20, intermediate_size=2**21, num_attention_heads=2**13))
    assert config.num_parameters > 10**13 and torch.get_default_device() == torch.device("cpu")
