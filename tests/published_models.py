"""config.json of published models, as far as sizes go: what their repositories on the Hugging Face Hub say."""

import json
from pathlib import Path
from typing import Any

from configs.model import SizedConfig
from engine.model.registry import read_config

Config = dict[str, Any]


def _config(architecture: str, kind: str, sizes: tuple[int, ...], **others: Any) -> Config:
    """sizes: vocabulary, hidden, intermediate, layers, query heads, KV heads, window."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings")
    return {
        "architectures": [architecture],
        "model_type": kind,
        **dict(zip(names, sizes, strict=True)),
        "rms_norm_eps": 1e-5,
        **others,
    }


def _llama(*sizes: int, **others: Any) -> Config:
    return _config("LlamaForCausalLM", "llama", sizes, **others)


def _mistral(*sizes: int, **others: Any) -> Config:
    return _config("MistralForCausalLM", "mistral", sizes, sliding_window=None, **others)


def _qwen2(*sizes: int, **others: Any) -> Config:
    return _config("Qwen2ForCausalLM", "qwen2", sizes, use_sliding_window=False, **others)


def _qwen3(*sizes: int, **others: Any) -> Config:
    return _config("Qwen3ForCausalLM", "qwen3", sizes, head_dim=128, **others)


def _qwen3_moe(*sizes: int, **others: Any) -> Config:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "head_dim": 128}
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", sizes, **experts, **others)


def _gemma2(*sizes: int, **others: Any) -> Config:
    return _config("Gemma2ForCausalLM", "gemma2", sizes, sliding_window=4096, **others)


def _gemma3(*sizes: int, **others: Any) -> Config:
    return _config("Gemma3ForCausalLM", "gemma3_text", sizes, **others)


TIED = {"tie_word_embeddings": True}

# A model's KV heads are left out where its file leaves them out: multi-head attention.
LLAMA_2_7B = _llama(32000, 4096, 11008, 32, 32, 32, 4096)
del LLAMA_2_7B["num_key_value_heads"]

OURS: dict[str, Config] = {
    "Llama-2-7B": LLAMA_2_7B,
    "Llama-2-13B": _llama(32000, 5120, 13824, 40, 40, 40, 4096),
    "Llama-2-70B": _llama(32000, 8192, 28672, 80, 64, 8, 4096),
    "Llama-3.1-70B": _llama(128256, 8192, 28672, 80, 64, 8, 131072),
    "Llama-3.1-8B": _llama(128256, 4096, 14336, 32, 32, 8, 131072),
    "Llama-3.2-1B": _llama(128256, 2048, 8192, 16, 32, 8, 131072, head_dim=64, **TIED),
    "Llama-3.2-3B": _llama(128256, 3072, 8192, 28, 24, 8, 131072, head_dim=128, **TIED),
    "TinyLlama-1.1B": _llama(32000, 2048, 5632, 22, 32, 4, 2048),
    "Mistral-7B-v0.3": _mistral(32768, 4096, 14336, 32, 32, 8, 32768),
    "Mistral-Nemo-12B": _mistral(131072, 5120, 14336, 40, 32, 8, 131072, head_dim=128),
    "Mistral-Small-24B": _mistral(131072, 5120, 32768, 40, 32, 8, 32768, head_dim=128),
    "Qwen2.5-0.5B": _qwen2(151936, 896, 4864, 24, 14, 2, 32768, **TIED),
    "Qwen2.5-1.5B": _qwen2(151936, 1536, 8960, 28, 12, 2, 131072, **TIED),
    "Qwen2.5-3B": _qwen2(151936, 2048, 11008, 36, 16, 2, 32768, **TIED),
    "Qwen2.5-7B": _qwen2(152064, 3584, 18944, 28, 28, 4, 131072),
    "Qwen2.5-14B": _qwen2(152064, 5120, 13824, 48, 40, 8, 131072),
    "Qwen2.5-32B": _qwen2(152064, 5120, 27648, 64, 40, 8, 131072),
    "Qwen2.5-72B": _qwen2(152064, 8192, 29568, 80, 64, 8, 131072),
    "Qwen3-0.6B": _qwen3(151936, 1024, 3072, 28, 16, 8, 40960, **TIED),
    "Qwen3-1.7B": _qwen3(151936, 2048, 6144, 28, 16, 8, 40960, **TIED),
    "Qwen3-4B": _qwen3(151936, 2560, 9728, 36, 32, 8, 40960, **TIED),
    "Qwen3-8B": _qwen3(151936, 4096, 12288, 36, 32, 8, 40960),
    "Qwen3-14B": _qwen3(151936, 5120, 17408, 40, 40, 8, 40960),
    "Qwen3-32B": _qwen3(151936, 5120, 25600, 64, 64, 8, 40960),
    "SmolLM2-135M": _llama(49152, 576, 1536, 30, 9, 3, 8192, **TIED),
    "SmolLM2-360M": _llama(49152, 960, 2560, 32, 15, 5, 8192, **TIED),
    "SmolLM2-1.7B": _llama(49152, 2048, 8192, 24, 32, 32, 8192, **TIED),
    "Gemma-3-270M": _gemma3(262144, 640, 2048, 18, 4, 1, 32768, head_dim=256, sliding_window=512),
    "Gemma-3-1B": _gemma3(262144, 1152, 6912, 26, 4, 1, 32768, head_dim=256, sliding_window=512),
    "Gemma-3-4B": _gemma3(262208, 2560, 10240, 34, 8, 4, 131072, head_dim=256, sliding_window=1024),
    "Gemma-3-12B": _gemma3(262208, 3840, 15360, 48, 16, 8, 131072, head_dim=256, sliding_window=1024),
    "Gemma-3-27B": _gemma3(262208, 5376, 21504, 62, 32, 16, 131072, head_dim=128, sliding_window=1024),
    "Phi-4-14B": _config("Phi3ForCausalLM", "phi3", (100352, 5120, 17920, 40, 40, 10, 16384), sliding_window=None),
}
"""Families that Octavo runs in code of its own. Of Gemma 3 from 4B on the text model's part."""
OTHERS: dict[str, Config] = {
    "Qwen3-30B-A3B": _qwen3_moe(151936, 2048, 6144, 48, 32, 4, 40960, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _qwen3_moe(151936, 4096, 12288, 94, 64, 4, 40960, moe_intermediate_size=1536),
    "Gemma-2-2B": _gemma2(256000, 2304, 9216, 26, 8, 4, 8192, head_dim=256, query_pre_attn_scalar=256),
    "Gemma-2-9B": _gemma2(256000, 3584, 14336, 42, 16, 8, 8192, head_dim=256, query_pre_attn_scalar=256),
    "Gemma-2-27B": _gemma2(256000, 4608, 36864, 46, 32, 16, 8192, head_dim=128, query_pre_attn_scalar=144),
}
"""Families that the library transformers runs."""


def write(folder: Path, name: str) -> Path:
    """A folder with the config.json of the model called `name`, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**OURS, **OTHERS}[name]))
    return folder


def sizes(folder: Path, name: str) -> SizedConfig:
    return read_config(write(folder, name), trust_remote_code=False)
