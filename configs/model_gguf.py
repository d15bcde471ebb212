"""A GGUF header under the keys of config.json and generation_config.json. Names of keys: gguf's `constants.py`."""

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from configs.errors import StartupError
from configs.gguf_file import GGUFFile
from configs.model_fields import Fields
from configs.model_rope import GGUFRope

Values = dict[str, Any]

KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_dimensions": "rope.dimension_count",
    "num_local_experts": "expert_count",
}
"""config.json key -> key in the file, after the architecture's name"""
GENERATION_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def gguf_fields(file: GGUFFile) -> tuple[Fields, Fields]:
    """(config.json, generation_config.json) as the GGUF header tells them."""
    metadata = {key: _shortest(value) for key, value in file.metadata.items()}
    name = str(metadata.get("general.architecture"))
    architecture, own_reader = GGUF_ARCHITECTURES.get(name, (f"GGUF architecture {name!r}", _nothing))
    own = {key: f"{name}.{suffix}" for key, suffix in KEYS.items()}
    values = {key: metadata.get(own_key) for key, own_key in own.items()}
    embedding = file.tensors.get("token_embd.weight")
    values |= {
        "architectures": [architecture],
        "vocab_size": values["vocab_size"] or (embedding.shape[0] if embedding and embedding.shape else None),
        "num_local_experts": values["num_local_experts"] or None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, metadata, name),
        "num_files": metadata.get("split.count"),
    }
    suffixes = {
        "rope_type": "rope.scaling.type",
        "factor": "rope.scaling.factor",
        "sliding_window": "attention.sliding_window",
        "rope_local_base_freq": "rope.freq_base_swa",
        "sliding_window_pattern": "attention.sliding_window_pattern",
    }
    own |= {key: f"{name}.{suffix}" for key, suffix in suffixes.items()}
    given = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    values |= own_reader(file, given)
    generation = {key: metadata.get(own_key) for key, own_key in GENERATION_KEYS.items()}
    return Fields(str(file.path), values, own), Fields(str(file.path), generation, GENERATION_KEYS)


# ------------------------------------------------------------------ what one architecture has of its own
def _nothing(file: GGUFFile, given: Mapping[str, Any]) -> Values:
    return {}


def _llama(file: GGUFFile, given: Mapping[str, Any]) -> Values:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _phi3(file: GGUFFile, given: Mapping[str, Any]) -> Values:
    """A window of 0 says that there is none."""
    return {"sliding_window": given.get("attention.sliding_window") or None}


def _gemma3(file: GGUFFile, given: Mapping[str, Any]) -> Values:
    """The 27B model alone, known by its 62 layers, scales by the mean size of a head: the file does not say."""
    values = {
        "sliding_window": given.get("attention.sliding_window") or None,
        "sliding_window_pattern": given.get("attention.sliding_window_pattern"),
        "rope_local_base_freq": given.get("rope.freq_base_swa"),
        "attn_logit_softcapping": given.get("attn_logit_softcapping"),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
        "query_pre_attn_scalar": None,
    }
    width, heads = given.get("embedding_length"), given.get("attention.head_count")
    if given.get("block_count") == 62 and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        values["query_pre_attn_scalar"] = width / heads
    return values


GGUF_ARCHITECTURES: dict[str, tuple[str, Callable[[GGUFFile, Mapping[str, Any]], Values]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", _nothing),
    "qwen3": ("Qwen3ForCausalLM", _nothing),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
}
"""general.architecture -> (architecture of config.json, reader of what it has of its own). Mistral's and SmolLM2's
files say 'llama'."""


# ------------------------------------------------------------------ rotary position encoding
def _rope(file: GGUFFile, metadata: Mapping[str, Any], name: str) -> Values:
    """`rope_parameters` in transformers' form; llama3 scaling travels as one divisor for each frequency, longrope as
    two sets of them."""
    scaling = {
        key.removeprefix(f"{name}.rope.scaling."): value
        for key, value in metadata.items()
        if key.startswith(f"{name}.rope.scaling.")
    }
    rope: Values = {"rope_type": scaling.get("type", "none")}
    if "rope_freqs.weight" in file.tensors:
        rope |= {"rope_type": GGUFRope.DIVISORS, "divisors": _float_tensor(file, "rope_freqs.weight")}
    rope |= {
        "factor": scaling.get("factor"),
        "original_max_position_embeddings": scaling.get("original_context_length"),
        "beta_fast": scaling.get("yarn_beta_fast"),
        "beta_slow": scaling.get("yarn_beta_slow"),
    }
    attention, factor = scaling.get("attn_factor"), scaling.get("factor")
    if "rope_factors_long.weight" in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": _float_tensor(file, "rope_factors_long.weight"),
            "short_factor": _float_tensor(file, "rope_factors_short.weight"),
            "attention_factor": attention,
        }
    elif isinstance(attention, float) and isinstance(factor, int | float) and factor >= 1.0:
        rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)  # ggml multiplies it with YaRN's own
    return {key: value for key, value in rope.items() if value is not None}


def _float_tensor(file: GGUFFile, name: str) -> tuple[float, ...]:
    tensor = file.tensors.get(name)
    size = 4 * math.prod(tensor.shape) if tensor else 0
    if tensor is None or tensor.type != 0 or tensor.offset + size > file.size:
        raise StartupError(f"--model: {file.path}: {name} is missing, cut short or not stored as 32-bit floats.")
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        data = stream.read(size)
    return struct.unpack(f"<{size // 4}f", data)


def _shortest(value: Any) -> Any:
    """The shortest decimal with the same 32-bit float: 1e-5 was meant where 9.999999747378752e-06 is read."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
