"""What a model is: shapes, position encoding, special tokens and generation defaults, read from its own files.

    config.json (+ generation_config.json) ─┐
                                            ├─> Fields ─> ModelConfig ─> planner, KV layout, modules
    GGUF header ────────────────────────────┘

Pure arithmetic and no torch: the API process reads it as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from configs.errors import StartupError
from configs.gguf_file import GGUFFile
from configs.kv import KVFormat, LayerKV
from configs.model_fields import GGUF_ARCHITECTURES, Fields, gguf_fields, read_json

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}
"""Architecture name in config.json -> module under engine/model/archs that builds it."""

RopeKind = Literal["none", "linear", "llama3", "yarn", "dynamic", "divisors"]
DType = Literal["bfloat16", "float16", "float32"]
ITEMSIZE: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding (Su et al. 2021) and its scaling to longer windows.

    linear: all frequencies divided by `factor`. dynamic: base grown with the window (NTK). llama3: low frequencies
    divided, smoothly. yarn (Peng et al. 2023): a ramp between divided and plain. divisors: one divisor a frequency.
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    """Window of the first training, where `kind` asks for it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: the ramp's ends are whole dimensions."""
    attention_factor: float = 1.0
    """yarn: multiplies cos and sin."""
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that the model's authors chose, used where a request names none; None: they chose none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Shapes are checked; `from_source` is how it is made."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    """Tokens of the window the model declares."""
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    dtype: DType | None
    """As declared; None where the file does not say."""
    generation: GenerationDefaults

    @classmethod
    def from_source(cls, path: Path) -> "ModelConfig":
        """Reads a model folder or a .gguf file.

        Raises `StartupError` naming file, key and value for what is missing, senseless or not supported.
        """
        if path.is_file():
            config, generation = gguf_fields(GGUFFile.read(path))
        elif not path.exists():
            raise StartupError(f"--model: {path} does not exist.")
        else:
            config = read_json(path / "config.json")
            file = path / "generation_config.json"
            generation = read_json(file) if file.exists() else Fields(str(file), {})
        return _build(config, generation)

    @property
    def window(self) -> int:
        """Tokens of context served by default.

        A sliding window caps it: up to its length every token sees all earlier ones, so causal attention is exact.
        """
        length = self.max_position
        if self.rope.kind == "yarn":
            length = max(length, int(self.rope.factor * self.rope.original_max_position))
        return min(length, self.sliding_window or length)

    @property
    def max_window(self) -> int:
        """Tokens of context that may be asked for: linear and dynamic scaling stretch the window by their factor."""
        if self.rope.kind not in ("linear", "dynamic"):
            return self.window
        length = int(self.max_position * self.rope.factor)
        return min(length, self.sliding_window or length)

    def effective_window(self, requested: int | None) -> int:
        """`requested`, or the model's own window. Raises `StartupError` where the model cannot have that many."""
        if requested is None:
            return self.window
        if not 1 <= requested <= self.max_window:
            reason = " (its sliding window)" if self.max_window == self.sliding_window else ""
            raise StartupError(
                f"--max-model-len {requested} is not possible: this model takes 1 to {self.max_window} tokens{reason}."
            )
        return requested

    def kv_layers(self, format: KVFormat) -> tuple[LayerKV, ...]:
        """What each attention layer keeps of a token."""
        return (LayerKV(self.num_kv_heads, self.head_dim, format),) * self.num_layers

    @property
    def num_parameters(self) -> int:
        """Numbers stored in the checkpoint; a tied head counts once."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        mlp = 3 * self.hidden_size * self.intermediate_size
        biases = self.attention_bias * (queries + 2 * keys + self.hidden_size)
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        norms = self.hidden_size * (2 * self.num_layers + 1)
        return embeddings + norms + self.num_layers * (attention + mlp + biases)

    def weight_bytes(self, dtype: DType) -> int:
        """Memory of the loaded weights. A tied head is a second, packed copy of the embedding table."""
        copies = self.vocab_size * self.hidden_size if self.tie_word_embeddings else 0
        return (self.num_parameters + copies) * ITEMSIZE[dtype]


# ------------------------------------------------------------------ what is refused, and why
def _experts(config: Fields) -> bool:
    return any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))


REFUSALS: tuple[tuple[Callable[[Fields], object], str], ...] = (
    (
        lambda c: c.get("num_files") not in (None, 0, 1),
        "the GGUF is split into several files: join them with llama-gguf-split --merge",
    ),
    (
        lambda c: c.get("quantization_config") or c.get("compression_config"),
        "its weights are quantised ({method}): take the bf16, fp16 or fp32 weights, or a GGUF file",
    ),
    (lambda c: c.get("is_encoder_decoder"), "encoder-decoder models are not supported"),
    (
        lambda c: any(c.get(key) for key in ("vision_config", "audio_config", "text_config")),
        "models for images or sound are not supported",
    ),
    (lambda c: c.get("kv_lora_rank"), "multi-head latent attention is not supported"),
    (_experts, "mixtures of experts are not supported"),
)


def _check_supported(config: Fields) -> str:
    """The architecture's name. Raises `StartupError` with the reason where it is not served."""
    names = config.get("architectures")
    name = str(names[0] if isinstance(names, list) and names else config.get("model_type") or "no architecture")
    supported = f"{', '.join(ARCHITECTURES)} and GGUF files of {', '.join(GGUF_ARCHITECTURES)}"
    method = config.get("quantization_config") or config.get("compression_config")
    for applies, reason in REFUSALS:
        if applies(config):
            words = reason.format(method=method.get("quant_method", "?") if isinstance(method, dict) else "?")
            raise StartupError(f"--model: {config.where} ({name}): {words}. Supported are {supported}.")
    if name not in ARCHITECTURES:
        raise StartupError(f"--model: {config.where} has {name}, which is not supported. Supported are {supported}.")
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(config.get(key), list):
            raise config.wrong(key, "one number for all layers")
    if (config.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise config.wrong("hidden_act", "silu")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise config.wrong("partial_rotary_factor", "1 (rotation of the whole head)")
    return name


# ------------------------------------------------------------------ reading
def _build(config: Fields, generation: Fields) -> ModelConfig:
    architecture = _check_supported(config)
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of the {num_heads} attention heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.wrong("hidden_size", f"a multiple of the {num_heads} attention heads, as there is no head_dim")
    head_dim = config.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2 or head_dim < 4:
        raise config.wrong("head_dim", f"even and at least 4 ({head_dim} here)")
    if config.get("rope_dimensions") not in (None, head_dim):
        raise config.wrong("rope_dimensions", f"{head_dim}, the size of a head")
    max_position = config.integer("max_position_embeddings")
    is_sliding = architecture == "MistralForCausalLM" and config.get("sliding_window") is not None
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        max_position=max_position,
        rms_norm_eps=config.positive("rms_norm_eps", default=1e-6),
        rope=_rope(config, max_position, head_dim),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        attention_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
        sliding_window=config.integer("sliding_window") if is_sliding else None,
        dtype=_dtype(config),
        generation=_generation(generation),
    )


def _rope(config: Fields, max_position: int, head_dim: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; older files have `rope_scaling` beside `rope_theta`."""
    given = config.nested("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
    key = "rope_type" if given.get("rope_type") else "type"
    kind = "none" if given.get(key) in (None, "default") else given.get(key)
    if kind not in get_args(RopeKind):
        raise given.wrong(key, f"one of {', '.join(get_args(RopeKind))}")
    if any(isinstance(value, dict) for value in given.values.values()):
        raise config.wrong("rope_parameters", "the same for all layers")
    if given.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise given.wrong("partial_rotary_factor", "1 (rotation of the whole head)")
    theta = given.positive("rope_theta", default=config.positive("rope_theta", default=10000.0))
    if theta <= 1.0:
        raise (given if given.get("rope_theta") is not None else config).wrong("rope_theta", "above 1")
    if kind == "none":
        return RopeConfig("none", theta)
    if kind == "divisors":
        divisors = given.get("divisors")
        known = isinstance(divisors, tuple) and all(math.isfinite(value) and value > 0.0 for value in divisors)
        if not known or len(divisors) != head_dim // 2:
            raise given.wrong("divisors", f"{head_dim // 2} positive numbers")
        return RopeConfig("divisors", theta, divisors=divisors)
    if kind in ("linear", "dynamic"):
        return RopeConfig("linear" if kind == "linear" else "dynamic", theta, given.number("factor", low=1.0))
    original_key = "original_max_position_embeddings"
    holder = config if config.get(original_key) is not None else given
    original = holder.integer(original_key, default=max_position)
    return _llama3(given, theta, original) if kind == "llama3" else _yarn(given, theta, original, max_position)


def _llama3(given: Fields, theta: float, original: int) -> RopeConfig:
    low, high = given.positive("low_freq_factor"), given.positive("high_freq_factor")
    if high <= low:
        raise given.wrong("high_freq_factor", f"above low_freq_factor ({low:g})")
    factor = given.number("factor", low=1.0)
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(given: Fields, theta: float, original: int, max_position: int) -> RopeConfig:
    factor = given.number("factor", default=max_position / original, low=1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=given.positive("beta_fast", default=32.0),
        beta_slow=given.positive("beta_slow", default=1.0),
        truncate=given.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _yarn_attention_factor(given: Fields, factor: float) -> float:
    """YaRN's temperature on the attention scores, applied to cos and sin (arXiv:2309.00071, eq. 22)."""
    if given.get("attention_factor") is not None:
        return given.positive("attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given.number("mscale")) / scale(given.number("mscale_all_dim"))
    return scale(1.0)


def _dtype(config: Fields) -> DType | None:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    for name in get_args(DType):
        if config.get(key) == name:
            return name  # type: ignore[no-any-return]
    if config.get(key) is not None:
        raise config.wrong(key, f"one of {', '.join(get_args(DType))}")
    return None


def _generation(given: Fields) -> GenerationDefaults:
    """`do_sample: false`, written out, asks for greedy choice; a file that says nothing of it does not."""

    def optional(key: str, low: float, high: float = math.inf) -> float | None:
        return None if given.get(key) is None else given.number(key, low=low, high=high)

    greedy = given.get("do_sample") is False
    top_k, max_new = given.get("top_k"), given.get("max_new_tokens")
    return GenerationDefaults(
        temperature=0.0 if greedy else optional("temperature", 0.0, 2.0),
        top_p=None if given.get("top_p") is None else given.positive("top_p", high=1.0),
        top_k=None if top_k is None else given.integer("top_k", low=-1),
        min_p=optional("min_p", 0.0, 1.0),
        repetition_penalty=None if given.get("repetition_penalty") is None else given.positive("repetition_penalty"),
        max_new_tokens=None if max_new is None else given.integer("max_new_tokens"),
    )
