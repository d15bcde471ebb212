"""Tiny random models of every family as folders on disk, as Hugging Face saves them, and the oracle beside them.

    folder/config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json

Weights are drawn with a fixed seed, wide enough that greedy choices are clear and attention matters; norms and biases
are random too. The tokenizer is byte-level: ids 0..255 are bytes, then the special tokens, then "<extra_N>" up to the
vocabulary's size, so that every id a random model can choose has a text.
"""

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL_TOKENS = {BOS: "<|begin|>", EOS: "<|end|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """What to build. Defaults: a Llama of two layers, four query heads, two KV heads, a window of 512 tokens."""

    kind: str = "llama"
    """A key of `CLASSES`"""
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    vocab_size: int = 260
    max_position: int = 512
    rope: Mapping[str, Any] = field(default_factory=dict)
    """`rope_parameters` of transformers 5; `rope_theta` defaults to 10000."""
    tied: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What only this kind has, under the names of config.json."""
    seed: int = 0
    scale: float = 0.15
    """Standard deviation of the weights."""
    dtype: str = "float32"
    max_shard_size: str = "5GB"
    """'20KB', say, makes several files with an index."""


CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "granite_swa": ("GraniteSWAConfig", "GraniteSWAForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
}
"""Configuration and model in transformers."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = {"sliding_window": 24}
NO_WINDOW = {"sliding_window": None}


def longrope(frequencies: int) -> dict[str, Any]:
    short, long = ([start + step * i for i in range(frequencies)] for start, step in ((1.0, 0.1), (1.5, 0.8)))
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


def gemma3(full: Mapping[str, Any], **values: Any) -> TinyModel:
    """Two layers with a window, one without, whose rope is `full`."""
    return TinyModel(
        kind="gemma3",
        num_layers=3,
        rope={
            "full_attention": {"rope_theta": 1e6, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        tied=True,
        extra={
            **WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        **values,
    )


VARIANTS: dict[str, TinyModel] = {
    "mha": TinyModel(num_kv_heads=4),
    "gqa": TinyModel(),
    "mqa": TinyModel(num_kv_heads=1),
    "tied": TinyModel(tied=True),
    "head-dim": TinyModel(head_dim=32),
    "attention-bias": TinyModel(extra={"attention_bias": True}),
    "mlp-bias": TinyModel(extra={"mlp_bias": True}, tied=True),
    "rope-theta": TinyModel(rope={"rope_type": "default", "rope_theta": 500000.0}),
    "rope-linear": TinyModel(rope={"rope_type": "linear", "factor": 4.0}),
    "rope-llama3": TinyModel(rope=LLAMA3),
    "rope-yarn": TinyModel(rope={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}),
    "rope-dynamic": TinyModel(rope={"rope_type": "dynamic", "factor": 4.0}),
    "mistral": TinyModel(kind="mistral", head_dim=32, extra=NO_WINDOW),
    "mistral-window": TinyModel(kind="mistral", extra=WINDOW),
    "qwen2": TinyModel(kind="qwen2", num_kv_heads=1, tied=True),
    "qwen2-window": TinyModel(
        kind="qwen2", num_kv_heads=4, extra={**WINDOW, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen3": TinyModel(kind="qwen3", head_dim=32, tied=True),
    "qwen3-bias": TinyModel(kind="qwen3", head_dim=16, num_kv_heads=4, extra={"attention_bias": True}),
    "phi3": TinyModel(kind="phi3", num_kv_heads=4, extra=WINDOW),
    "phi3-short": TinyModel(kind="phi3", rope=longrope(8), extra={"original_max_position_embeddings": 256}),
    "phi3-long": TinyModel(
        kind="phi3",
        num_kv_heads=1,
        rope={**longrope(6), "partial_rotary_factor": 0.75},
        tied=True,
        extra={"original_max_position_embeddings": 64},
    ),
    "gemma3": gemma3({"rope_type": "default"}, num_kv_heads=1, head_dim=32),
    "gemma3-linear": gemma3({"rope_type": "linear", "factor": 8.0}, head_dim=16),
}
"""Every shape of the families that are served, by name: what parity tests go over."""
FALLBACKS: dict[str, TinyModel] = {
    "gpt2": TinyModel(kind="gpt2", num_kv_heads=4, tied=True),
    "gpt_neox": TinyModel(kind="gpt_neox", num_kv_heads=4),
    "olmo2": TinyModel(kind="olmo2"),
    "cohere2": TinyModel(
        kind="cohere2",
        num_layers=3,
        tied=True,
        extra={**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mixtral": TinyModel(kind="mixtral", extra={"num_local_experts": 4, "num_experts_per_tok": 2, **NO_WINDOW}),
    "gemma2": TinyModel(
        kind="gemma2",
        head_dim=16,
        tied=True,
        extra={**WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    ),
    "granite_swa": TinyModel(kind="granite_swa", tied=True, extra={**WINDOW, "attention_multiplier": 0.2}),
    "gpt_oss": TinyModel(
        kind="gpt_oss", head_dim=16, extra={**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
}
"""Families that no code of ours names. They have: learned positions, transposed weights; parallel blocks with biases, a
rotation of part of a head; norms behind the blocks and over all heads; windows, layers without positions; experts;
soft-capped scores; sinks; both of the last two and experts with biases, weights transposed and gates interleaved."""
FAMILIES = ("gqa", "mistral-window", "qwen2-window", "qwen3", "phi3", "phi3-long", "gemma3")
"""One variant or two of each family, where all of them would take too long."""


def build(folder: Path, tiny: TinyModel = VARIANTS["gqa"]) -> Path:
    """Writes the model into `folder`, made if need be, and returns it."""
    with quiet():
        import transformers

        config_class, model_class = (getattr(transformers, name) for name in CLASSES[tiny.kind])
        nested = any(isinstance(value, Mapping) for value in tiny.rope.values())
        plain = {} if nested else {"rope_type": "default", "rope_theta": 10000.0}
        config = config_class(
            vocab_size=tiny.vocab_size,
            hidden_size=tiny.hidden_size,
            intermediate_size=tiny.intermediate_size,
            num_hidden_layers=tiny.num_layers,
            num_attention_heads=tiny.num_heads,
            num_key_value_heads=tiny.num_kv_heads,
            max_position_embeddings=tiny.max_position,
            rms_norm_eps=1e-5,
            rope_parameters=plain | copy.deepcopy(dict(tiny.rope)),
            tie_word_embeddings=tiny.tied,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=None,
            **({"head_dim": tiny.head_dim} if tiny.head_dim else {}),
            **tiny.extra,
        )
        model = model_class(config)
        _draw_weights(model, tiny)
        model.to(getattr(torch, tiny.dtype)).save_pretrained(folder, max_shard_size=tiny.max_shard_size)
    write_tokenizer(folder, tiny.vocab_size)
    return folder


def build_outlier(folder: Path, size: float, width: float = 1.0) -> Path:
    """A Llama whose keys have one channel that is `size` at every token (others: about 1), as real models have some.
    width: how many times wider than others it varies from token to token."""
    tiny = TinyModel(head_dim=64, num_heads=2, num_kv_heads=1, extra={"attention_bias": True})
    weights = load_file(build(folder, tiny) / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("k_proj.bias"):
            weight[-1] = size  # of the dims that turn, the slowest
        elif name.endswith("k_proj.weight"):
            weight[-1] *= width
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def load_reference(folder: Path, dtype: torch.dtype = torch.float32, window: int = 0) -> Any:
    """The folder's model in transformers, eager attention: the oracle.

    `window`: which of longrope's two sets of divisors holds; transformers would choose by each sequence's length.
    """
    with quiet():
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        if config.rope_parameters.get("rope_type") == "longrope":
            long = window > config.original_max_position_embeddings
            factors = config.rope_parameters["long_factor" if long else "short_factor"]
            config.rope_parameters |= {"long_factor": factors, "short_factor": factors}
        return AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="eager"
        ).eval()


def write_tokenizer(folder: Path, vocab_size: int = 260) -> None:
    """A byte-level tokenizer.json of `vocab_size` >= 260 tokens and its configuration, with a chat template."""
    specials = {**SPECIAL_TOKENS, **{index: f"<extra_{index}>" for index in range(260, vocab_size)}}
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_chars().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials.values()])
    assert [tokenizer.token_to_id(text) for text in specials.values()] == list(specials)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@contextmanager
def quiet() -> Iterator[None]:
    """transformers warns about its own matters; here nobody asks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        level = logging.get_verbosity()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)


def _draw_weights(model: torch.nn.Module, tiny: TinyModel) -> None:
    generator = torch.Generator().manual_seed(tiny.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * tiny.scale
            is_norm = name.endswith("norm.weight") and not tiny.kind.startswith("gemma")  # whose norms are less 1
            parameter.copy_(1.0 + values if is_norm else values)


def _byte_chars() -> dict[int, str]:
    """Byte -> the printable character that stands for it in GPT-2's byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
