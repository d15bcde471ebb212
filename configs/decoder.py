"""The families that Octavo runs in code of its own: shapes and position encoding from the keys of config.json."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from configs.gguf_forms import StoredForms
from configs.kv import KVFormat, LayerKV
from configs.model import (
    ITEMSIZE,
    DType,
    GenerationDefaults,
    SizedConfig,
    WeightFormat,
    architecture,
    declared_dtype,
)
from configs.model_fields import MIN_POSITIONS, Fields
from configs.model_rope import RopeConfig, RopeContext, read_rope, read_theta, rope_parameters, windows

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Name in config.json -> ours"""


@dataclass(frozen=True)
class DecoderConfig(SizedConfig):
    """A decoder-only transformer: Llama and what may differ from it. Shapes are checked; `read_model` makes it."""

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
    stored: StoredForms | None = None
    """In what codes a GGUF file has the weights of linear layers, if in any."""

    @property
    def has_codes(self) -> bool:
        return self.stored is not None

    @property
    def window(self) -> int:
        return windows(self.rope.kind, self.rope.factor, self.rope.original_max_position, self.max_position)[0]

    @property
    def max_window(self) -> int:
        return windows(self.rope.kind, self.rope.factor, self.rope.original_max_position, self.max_position)[1]

    def kv_layers(self, format: KVFormat) -> tuple[LayerKV, ...]:
        return tuple(LayerKV(self.num_kv_heads, self.head_dim, format, window) for window in self.layer_windows)

    @property
    def num_parameters(self) -> int:
        embedding = 0 if self.tie_word_embeddings else self._embedding_parameters
        return embedding + self._linear_parameters + self._bias_parameters + self._norm_parameters

    def weight_bytes(self, dtype: DType, quantization: WeightFormat = "none") -> int:
        """Memory of the loaded weights. A tied head is a second, packed copy of the embedding table."""
        size = ITEMSIZE[dtype]
        if quantization == "int8":
            linear = self._linear_parameters + self._linear_outputs * ITEMSIZE["float32"]
        elif quantization == "stored":
            linear = self._stored_linear_bytes(size)
        else:
            linear = self._linear_parameters * size
        norm_size = ITEMSIZE["float32"] if self.zero_centred_norms else size
        others = self._embedding_parameters + self._bias_parameters
        return linear + others * size + self._norm_parameters * norm_size

    def table_bytes(self, window: int) -> int:
        """Cosines and sines in fp32, of each rope."""
        return (1 if self.local_rope is None else 2) * window * self.rotary_dim * ITEMSIZE["float32"]

    @property
    def _embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def _linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the linear layers of one layer, by their names in `LayerForms`."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (queries + 2 * keys, self.hidden_size),
            "o": (self.hidden_size, queries),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }

    @property
    def _linear_parameters(self) -> int:
        """Of the weights that are multiplied by, the head's too."""
        one = sum(outputs * inputs for outputs, inputs in self._linears.values())
        return self._embedding_parameters + self.num_layers * one

    @property
    def _linear_outputs(self) -> int:
        return self.vocab_size + self.num_layers * sum(outputs for outputs, _ in self._linears.values())

    def _stored_linear_bytes(self, size: int) -> int:
        """size: of a number that is not in codes."""
        assert self.stored is not None
        numbers = [(self.stored.head, self._embedding_parameters)]
        for layer in self.stored.layers:
            for name, (outputs, inputs) in self._linears.items():
                numbers.append((getattr(layer, name), outputs * inputs))
        return sum(count * size if form is None else form.bytes_of(count) for form, count in numbers)

    @property
    def _bias_parameters(self) -> int:
        biases = self.qkv_bias * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        biases += self.o_bias * self.hidden_size
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        return self.num_layers * biases

    @property
    def _norm_parameters(self) -> int:
        norms = self.hidden_size * (4 if self.post_norms else 2) + self.qk_norm * 2 * self.head_dim
        return self.hidden_size + self.num_layers * norms


# ------------------------------------------------------------------ reading: what all architectures have
def _plain(config: Fields, rope: Fields | None = None, theta: float = 10000.0, partial: bool = False) -> DecoderConfig:
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
    max_position = config.integer("max_position_embeddings", low=MIN_POSITIONS)
    num_layers = config.integer("num_hidden_layers")
    rope = rope_parameters(config) if rope is None else rope
    rotary_dim = _rotary_dim(config, rope, head_dim, partial)
    context = RopeContext(config, max_position, rotary_dim, read_theta(config, "rope_theta", theta))
    return DecoderConfig(
        architecture=architecture(config),
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
        dtype=declared_dtype(config),
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


def _with_windows(model: DecoderConfig, config: Fields, sliding: Sequence[bool]) -> DecoderConfig:
    """`sliding`: the layers that have the window. One that no sequence can exceed is none."""
    if config.get("sliding_window") is None or not any(sliding):
        return model
    window = config.integer("sliding_window")
    if window >= model.max_window and model.local_rope is None:
        return model
    return replace(model, layer_windows=tuple(window if slides else None for slides in sliding))


# ------------------------------------------------------------------ reading: one function for each architecture
def _llama(config: Fields) -> DecoderConfig:
    bias, mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    return replace(_plain(config), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: Fields) -> DecoderConfig:
    plain = _plain(config)
    return _with_windows(plain, config.with_defaults(sliding_window=4096), [True] * plain.num_layers)


def _qwen2(config: Fields) -> DecoderConfig:
    return _with_qwen_windows(replace(_plain(config), qkv_bias=True), config)


def _qwen3(config: Fields) -> DecoderConfig:
    bias, plain = config.flag("attention_bias", default=False), _plain(config.with_defaults(head_dim=128))
    return _with_qwen_windows(replace(plain, qk_norm=True, qkv_bias=bias, o_bias=bias), config)


def _with_qwen_windows(model: DecoderConfig, config: Fields) -> DecoderConfig:
    if not config.flag("use_sliding_window", default=False):
        return model
    first = config.integer("max_window_layers", default=28, low=0)
    sliding = _sliding_layers(config, [layer >= first for layer in range(model.num_layers)])
    return _with_windows(model, config.with_defaults(sliding_window=4096), sliding)


def _phi3(config: Fields) -> DecoderConfig:
    """Phi-3 and Phi-4. Early files call longrope `su` or `yarn`."""
    rope = rope_parameters(config)
    if "yarn" in (rope.get("rope_type"), rope.get("type")):
        rope = rope.with_values(rope_type="longrope")
    plain = _plain(config, rope, partial=True)
    return _with_windows(plain, config, [True] * plain.num_layers)


def _gemma3(config: Fields) -> DecoderConfig:
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
    read: Callable[[Fields], DecoderConfig]


FAMILIES = {
    "LlamaForCausalLM": Family("llama", _llama),
    "MistralForCausalLM": Family("llama", _mistral),
    "Qwen2ForCausalLM": Family("llama", _qwen2),
    "Qwen3ForCausalLM": Family("llama", _qwen3),
    "Phi3ForCausalLM": Family("phi3", _phi3),
    "Gemma3ForCausalLM": Family("gemma3", _gemma3),
}
"""By the architecture's name in config.json."""
