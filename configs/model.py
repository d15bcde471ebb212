"""What a model is: shapes, position encoding, special tokens and generation defaults, read from its own files.

    config.json (+ generation_config.json) ─┐          architecture
                                            ├─> Fields ───────────> its reader ─> ModelConfig ─> planner, KV layout, …
    GGUF header ────────────────────────────┘

Pure arithmetic and no torch: the API process reads it as well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from configs.errors import StartupError
from configs.gguf_file import GGUFFile
from configs.kv import KVFormat, LayerKV
from configs.model_fields import Fields, read_json
from configs.model_gguf import GGUF_ARCHITECTURES, gguf_fields
from configs.model_rope import RopeConfig, RopeContext, read_rope, read_theta, rope_parameters

DType = Literal["bfloat16", "float16", "float32"]
ITEMSIZE: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Name in config.json -> ours"""


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
    """A decoder-only transformer: Llama and what may differ from it. Shapes are checked; `from_source` makes it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """The first dims of a head, which are rotated; the others pass."""
    intermediate_size: int
    max_position: int
    """Tokens of the window the model declares."""
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None
    """Of the layers with a window, where it is another."""
    layer_windows: tuple[int | None, ...]
    """For each layer, how many tokens a row sees, itself included; None: all earlier ones."""
    attention_scale: float
    """Multiplies q . k."""
    qk_norm: bool
    """Each head's query and key are normed before they are rotated."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: Activation
    """Of the gates."""
    zero_centred_norms: bool
    """The checkpoint stores a norm's weight less 1; it is applied in fp32."""
    post_norms: bool
    """What attention and MLP add is normed too."""
    embedding_scale: float
    tie_word_embeddings: bool
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
        family = FAMILIES[supported_architecture(config)]
        return replace(family.read(config), generation=_generation(generation))

    @property
    def window(self) -> int:
        """Tokens of context served by default."""
        if self.rope.kind == "yarn":
            return max(self.max_position, int(self.rope.factor * self.rope.original_max_position))
        return self.max_position

    @property
    def max_window(self) -> int:
        """Tokens of context that may be asked for: linear and dynamic scaling stretch the window by their factor."""
        stretched = self.rope.kind in ("linear", "dynamic")
        return int(self.max_position * self.rope.factor) if stretched else self.window

    def effective_window(self, requested: int | None) -> int:
        """`requested`, or the model's own window. Raises `StartupError` where the model cannot have that many."""
        if requested is None:
            return self.window
        if not 1 <= requested <= self.max_window:
            raise StartupError(
                f"--max-model-len {requested} is not possible: this model takes 1 to {self.max_window} tokens."
            )
        return requested

    def kv_layers(self, format: KVFormat) -> tuple[LayerKV, ...]:
        """What each attention layer keeps of a token."""
        return tuple(LayerKV(self.num_kv_heads, self.head_dim, format, window) for window in self.layer_windows)

    @property
    def num_parameters(self) -> int:
        """Numbers stored in the checkpoint; a tied head counts once."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        mlp = 3 * self.hidden_size * self.intermediate_size
        biases = self.qkv_bias * (queries + 2 * keys) + self.o_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self._norm_parameters + self.num_layers * (attention + mlp + biases)

    def weight_bytes(self, dtype: DType) -> int:
        """Memory of the loaded weights. A tied head is a second, packed copy of the embedding table."""
        copies = self.vocab_size * self.hidden_size if self.tie_word_embeddings else 0
        norms = self._norm_parameters
        norm_size = ITEMSIZE["float32" if self.zero_centred_norms else dtype]
        return (self.num_parameters + copies - norms) * ITEMSIZE[dtype] + norms * norm_size

    @property
    def _norm_parameters(self) -> int:
        norms = self.hidden_size * (4 if self.post_norms else 2) + self.qk_norm * 2 * self.head_dim
        return self.hidden_size + self.num_layers * norms


# ------------------------------------------------------------------ what is refused, and why
def _experts(config: Fields) -> bool:
    return any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))


def _quantisation(config: Fields) -> str:
    """Method by which the weights are quantised, "" if they are not."""
    for key in ("quantization_config", "compression_config"):
        if given := config.get(key):
            return str(given.get("quant_method", "?")) if isinstance(given, dict) else "?"
    return ""


REFUSALS: tuple[tuple[Callable[[Fields], object], str], ...] = (
    (
        lambda c: c.get("num_files") not in (None, 0, 1),
        "the GGUF is split into several files: join them with llama-gguf-split --merge",
    ),
    (_quantisation, "its weights are quantised ({method}): take the bf16, fp16 or fp32 weights, or a GGUF file"),
    (lambda c: c.get("is_encoder_decoder"), "encoder-decoder models are not supported"),
    (
        lambda c: any(c.get(key) for key in ("vision_config", "audio_config", "text_config")),
        "models for images or sound are not supported",
    ),
    (lambda c: c.get("kv_lora_rank"), "multi-head latent attention is not supported"),
    (_experts, "mixtures of experts are not supported"),
)


def supported_architecture(config: Fields) -> str:
    """The architecture's name. Raises `StartupError` with the reason where it is not served."""
    names = config.get("architectures")
    name = str(names[0] if isinstance(names, list) and names else config.get("model_type") or "no architecture")
    supported = f"{', '.join(FAMILIES)} and GGUF files of {', '.join(GGUF_ARCHITECTURES)}"
    for applies, reason in REFUSALS:
        if applies(config):
            words = reason.format(method=_quantisation(config))
            raise StartupError(f"--model: {config.where} ({name}): {words}. Supported are {supported}.")
    if name not in FAMILIES:
        raise StartupError(f"--model: {config.where} has {name}, which is not supported. Supported are {supported}.")
    return name


# ------------------------------------------------------------------ reading: what all architectures have
def _plain(config: Fields, rope: Fields | None = None, theta: float = 10000.0, partial: bool = False) -> ModelConfig:
    """A Llama without biases. `rope`: parameters of the whole, config.json's own by default; `theta`: where none is
    given; `partial`: a part of a head may be rotated."""
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(config.get(key), list):
            raise config.wrong(key, "one number for all layers")
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of the {num_heads} attention heads")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.wrong("hidden_size", f"a multiple of the {num_heads} attention heads, as there is no head_dim")
    head_dim = config.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2 or head_dim < 4:
        raise config.wrong("head_dim", f"even and at least 4 ({head_dim} here)")
    max_position, num_layers = config.integer("max_position_embeddings"), config.integer("num_hidden_layers")
    rope = rope_parameters(config) if rope is None else rope
    rotary_dim = _rotary_dim(config, rope, head_dim, partial)
    context = RopeContext(config, max_position, rotary_dim, read_theta(config, "rope_theta", theta))
    return ModelConfig(
        architecture=supported_architecture(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        intermediate_size=config.integer("intermediate_size"),
        max_position=max_position,
        rms_norm_eps=config.positive("rms_norm_eps", default=1e-6),
        rope=read_rope(context, rope),
        local_rope=None,
        layer_windows=(None,) * num_layers,
        attention_scale=head_dim**-0.5,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        activation=_activation(config, "hidden_act"),
        zero_centred_norms=False,
        post_norms=False,
        embedding_scale=1.0,
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        dtype=_dtype(config),
        generation=GenerationDefaults(),
    )


def _activation(config: Fields, key: str) -> Activation:
    name = config.get(key) or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise config.wrong(key, "silu or gelu_pytorch_tanh")
    return ACTIVATIONS[name]


def _rotary_dim(config: Fields, rope: Fields, head_dim: int, partial: bool) -> int:
    holder = rope if rope.get("partial_rotary_factor") is not None else config
    if not partial:
        if holder.get("partial_rotary_factor") not in (None, 1):
            raise holder.wrong("partial_rotary_factor", "1 (rotation of the whole head)")
        if config.get("rope_dimensions") not in (None, head_dim):
            raise config.wrong("rope_dimensions", f"{head_dim}, the size of a head")
        return head_dim
    share = int(head_dim * holder.positive("partial_rotary_factor", default=1.0, high=1.0))
    rotary_dim = config.integer("rope_dimensions", default=share)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        words = f"an even part of a head's {head_dim} dims"
        if config.get("rope_dimensions") is not None:
            raise config.wrong("rope_dimensions", words)
        raise holder.wrong("partial_rotary_factor", words)
    return rotary_dim


def _sliding_layers(config: Fields, default: Sequence[bool]) -> Sequence[bool]:
    """For each layer whether it has the sliding window."""
    kinds = config.get("layer_types")
    if kinds is None:
        return default
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != len(default) or any(kind not in known for kind in kinds):
        raise config.wrong("layer_types", f"a list of {len(default)} times full_attention or sliding_attention")
    return [kind == "sliding_attention" for kind in kinds]


def _with_windows(model: ModelConfig, config: Fields, sliding: Sequence[bool]) -> ModelConfig:
    """`sliding`: the layers that have the window. One that no sequence can exceed is none."""
    if config.get("sliding_window") is None or not any(sliding):
        return model
    window = config.integer("sliding_window")
    if window >= model.max_window and model.local_rope is None:
        return model
    return replace(model, layer_windows=tuple(window if slides else None for slides in sliding))


# ------------------------------------------------------------------ reading: one function for each architecture
def _llama(config: Fields) -> ModelConfig:
    bias, mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    return replace(_plain(config), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: Fields) -> ModelConfig:
    plain = _plain(config)
    return _with_windows(plain, config.with_defaults(sliding_window=4096), [True] * plain.num_layers)


def _qwen2(config: Fields) -> ModelConfig:
    return _with_qwen_windows(replace(_plain(config), qkv_bias=True), config)


def _qwen3(config: Fields) -> ModelConfig:
    bias, plain = config.flag("attention_bias", default=False), _plain(config.with_defaults(head_dim=128))
    return _with_qwen_windows(replace(plain, qk_norm=True, qkv_bias=bias, o_bias=bias), config)


def _with_qwen_windows(model: ModelConfig, config: Fields) -> ModelConfig:
    if not config.flag("use_sliding_window", default=False):
        return model
    first = config.integer("max_window_layers", default=28, low=0)
    sliding = _sliding_layers(config, [layer >= first for layer in range(model.num_layers)])
    return _with_windows(model, config.with_defaults(sliding_window=4096), sliding)


def _phi3(config: Fields) -> ModelConfig:
    """Phi-3 and Phi-4. Early files call longrope `su` or `yarn`."""
    rope = rope_parameters(config)
    if "yarn" in (rope.get("rope_type"), rope.get("type")):
        rope = rope.with_values(rope_type="longrope")
    plain = _plain(config, rope, partial=True)
    return _with_windows(plain, config, [True] * plain.num_layers)


def _gemma3(config: Fields) -> ModelConfig:
    """The text model: three kinds of norms more than Llama, and a window with its own rope on five layers of six."""
    config = config.with_defaults(
        head_dim=256,
        tie_word_embeddings=True,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh",
    )
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise config.wrong(key, "absent, as it is not supported")
    rope = rope_parameters(config)
    by_kind = "full_attention" in rope.values or "sliding_attention" in rope.values
    local = rope.nested("sliding_attention") if by_kind else Fields(config.where, {})
    plain = _plain(config, rope.nested("full_attention") if by_kind else rope, theta=1e6)
    local_theta = read_theta(config, "rope_local_base_freq", 10000.0)
    pattern = config.integer("sliding_window_pattern", default=6)
    model = replace(
        plain,
        local_rope=read_rope(RopeContext(config, plain.max_position, plain.head_dim, local_theta), local),
        attention_scale=config.positive("query_pre_attn_scalar", default=plain.head_dim) ** -0.5,
        qk_norm=True,
        activation=_activation(config, "hidden_activation"),
        zero_centred_norms=True,
        post_norms=True,
        embedding_scale=math.sqrt(plain.hidden_size),
    )
    sliding = [(layer + 1) % pattern != 0 for layer in range(plain.num_layers)]
    return _with_windows(model, config, _sliding_layers(config, sliding))


@dataclass(frozen=True)
class Family:
    """How an architecture is read and built."""

    module: str
    """Under engine/model/archs."""
    read: Callable[[Fields], ModelConfig]


FAMILIES = {
    "LlamaForCausalLM": Family("llama", _llama),
    "MistralForCausalLM": Family("llama", _mistral),
    "Qwen2ForCausalLM": Family("llama", _qwen2),
    "Qwen3ForCausalLM": Family("llama", _qwen3),
    "Phi3ForCausalLM": Family("phi3", _phi3),
    "Gemma3ForCausalLM": Family("gemma3", _gemma3),
}
"""By the architecture's name in config.json."""


# ------------------------------------------------------------------ reading: the rest
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
