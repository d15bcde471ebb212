"""Raw model metadata, checked on access: config.json, generation_config.json and GGUF heads under one set of keys."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import StartupError
from configs.gguf_file import GGUFFile


@dataclass(frozen=True)
class Fields:
    """Values under the keys of config.json. Every complaint names the file, its own key and the value."""

    where: str
    values: Mapping[str, Any]
    own_keys: Mapping[str, str] = field(default_factory=dict)
    """config.json key -> the file's own name of it, where that differs (GGUF)."""

    def get(self, key: str) -> Any:
        """The value, None where absent or null."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(key, f"an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number in [low, high]."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, "a number")
        if not low <= value <= high:
            raise self.wrong(key, f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}")
        return float(value)

    def positive(self, key: str, default: float | None = None, high: float = math.inf) -> float:
        value = self.number(key, default, high=high)
        if value == 0.0:
            raise self.wrong(key, "above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def nested(self, key: str) -> "Fields":
        """The mapping under `key`; empty where absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "a mapping")
        return Fields(f"{self.where}: {key}", value or {}, self.own_keys)

    def wrong(self, key: str, requirement: str) -> StartupError:
        name = self.own_keys.get(key, key)
        if self.get(key) is None:
            return StartupError(f"--model: {self.where}: {name} is missing; it must be {requirement}.")
        return StartupError(f"--model: {self.where}: {name} must be {requirement}, got {self.get(key)!r}.")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        return default if value is None else value


def read_json(path: Path) -> Fields:
    """A JSON object from disk. Raises `StartupError` where it is missing or is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"--model: {path.parent} holds no {path.name}, so it is not a model folder.") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"--model: {path} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise StartupError(f"--model: {path} must hold a JSON object, got {type(values).__name__}.")
    return Fields(str(path), values)


GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
"""general.architecture -> architecture name of config.json. Mistral and SmolLM2 files say 'llama' too."""
GGUF_KEYS = {
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
    "num_local_experts": "expert_count",
    "sliding_window": "attention.sliding_window",
}
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
    name = metadata.get("general.architecture")
    own = {key: f"{name}.{suffix}" for key, suffix in GGUF_KEYS.items()}
    values = {key: metadata.get(own_key) for key, own_key in own.items()}
    embedding = file.tensors.get("token_embd.weight")
    values |= {
        "architectures": [GGUF_ARCHITECTURES.get(str(name), f"GGUF architecture {name!r}")],
        "vocab_size": values["vocab_size"] or (embedding.shape[0] if embedding and embedding.shape else None),
        "num_local_experts": values["num_local_experts"] or None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_dimensions": metadata.get(f"{name}.rope.dimension_count"),
        "rope_parameters": _gguf_rope(file, metadata, str(name)),
        "num_files": metadata.get("split.count"),
    }
    rope = {"rope_dimensions": "dimension_count", "rope_type": "scaling.type", "factor": "scaling.factor"}
    own |= {key: f"{name}.rope.{suffix}" for key, suffix in rope.items()}
    generation = {key: metadata.get(own_key) for key, own_key in GENERATION_KEYS.items()}
    return Fields(str(file.path), values, own), Fields(str(file.path), generation, GENERATION_KEYS)


def _gguf_rope(file: GGUFFile, metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`rope_parameters` in transformers' form; llama3 scaling travels as one divisor for each frequency."""
    scaling = {
        key.removeprefix(f"{name}.rope.scaling."): value
        for key, value in metadata.items()
        if key.startswith(f"{name}.rope.scaling.")
    }
    rope: dict[str, Any] = {"rope_type": scaling.get("type", "none")}
    if "rope_freqs.weight" in file.tensors:
        rope |= {"rope_type": "divisors", "divisors": _float_tensor(file, "rope_freqs.weight")}
    if "rope_factors_long.weight" in file.tensors:
        rope["rope_type"] = "longrope"
    rope |= {
        "factor": scaling.get("factor"),
        "original_max_position_embeddings": scaling.get("original_context_length"),
        "beta_fast": scaling.get("yarn_beta_fast"),
        "beta_slow": scaling.get("yarn_beta_slow"),
    }
    attention, factor = scaling.get("attn_factor"), scaling.get("factor")
    if isinstance(attention, float) and isinstance(factor, int | float) and factor >= 1.0:
        rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)  # ggml multiplies it with YaRN's own
    return {key: value for key, value in rope.items() if value is not None}


def _float_tensor(file: GGUFFile, name: str) -> tuple[float, ...]:
    tensor = file.tensors[name]
    size = 4 * math.prod(tensor.shape)
    if tensor.type != 0 or tensor.offset + size > file.size:
        raise StartupError(f"--model: {file.path}: {name} is cut short or not stored as 32-bit floats.")
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
