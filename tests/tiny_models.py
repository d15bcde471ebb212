"""Tiny random models of the Llama family as folders on disk, as Hugging Face saves them, and the oracle beside them.

    folder/config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json

Weights are drawn with a fixed seed, wide enough that greedy choices are clear and attention matters; norms and biases
are random too. The tokenizer is byte-level: ids 0..255 are bytes, then the special tokens, then "<extra_N>" up to the
vocabulary's size, so that every id a random model can choose has a text.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL_TOKENS = {BOS: "<|begin|>", EOS: "<|end|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """What to build. Defaults: two layers, four query heads, two KV heads, a window of 512 tokens."""

    kind: str = "llama"
    """'llama' or 'mistral'"""
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
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    seed: int = 0
    scale: float = 0.15
    """Standard deviation of the weights."""
    dtype: str = "float32"
    max_shard_size: str = "5GB"
    """'20KB', say, makes several files with an index."""


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, TinyLlama] = {
    "mha": TinyLlama(num_kv_heads=4),
    "gqa": TinyLlama(),
    "mqa": TinyLlama(num_kv_heads=1),
    "tied": TinyLlama(tied=True),
    "head-dim": TinyLlama(head_dim=32),
    "attention-bias": TinyLlama(attention_bias=True),
    "mlp-bias": TinyLlama(mlp_bias=True, tied=True),
    "rope-theta": TinyLlama(rope={"rope_type": "default", "rope_theta": 500000.0}),
    "rope-linear": TinyLlama(rope={"rope_type": "linear", "factor": 4.0}),
    "rope-llama3": TinyLlama(rope=LLAMA3),
    "rope-yarn": TinyLlama(rope={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}),
    "rope-dynamic": TinyLlama(rope={"rope_type": "dynamic", "factor": 4.0}),
    "mistral": TinyLlama(kind="mistral", head_dim=32),
}
"""Every shape of the family, by name: what parity tests go over."""


def build(folder: Path, tiny: TinyLlama = VARIANTS["gqa"]) -> Path:
    """Writes the model into `folder`, made if need be, and returns it."""
    with quiet():
        from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

        only_llama = {"attention_bias": tiny.attention_bias, "mlp_bias": tiny.mlp_bias}
        only_mistral = {"sliding_window": tiny.sliding_window}
        config = (LlamaConfig if tiny.kind == "llama" else MistralConfig)(
            vocab_size=tiny.vocab_size,
            hidden_size=tiny.hidden_size,
            intermediate_size=tiny.intermediate_size,
            num_hidden_layers=tiny.num_layers,
            num_attention_heads=tiny.num_heads,
            num_key_value_heads=tiny.num_kv_heads,
            head_dim=tiny.head_dim,
            max_position_embeddings=tiny.max_position,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | dict(tiny.rope),
            tie_word_embeddings=tiny.tied,
            bos_token_id=BOS,
            eos_token_id=EOS,
            **(only_llama if tiny.kind == "llama" else only_mistral),
        )
        model = (LlamaForCausalLM if tiny.kind == "llama" else MistralForCausalLM)(config)
        _draw_weights(model, tiny)
        model.to(getattr(torch, tiny.dtype)).save_pretrained(folder, max_shard_size=tiny.max_shard_size)
    write_tokenizer(folder, tiny.vocab_size)
    return folder


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder's model in transformers, eager attention: the oracle."""
    with quiet():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


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


def _draw_weights(model: torch.nn.Module, tiny: TinyLlama) -> None:
    generator = torch.Generator().manual_seed(tiny.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator) * tiny.scale
            parameter.copy_(1.0 + values if name.endswith("norm.weight") else values)


def _byte_chars() -> dict[int, str]:
    """Byte -> the printable character that stands for it in GPT-2's byte-level vocabularies."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
