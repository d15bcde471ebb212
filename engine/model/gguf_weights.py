"""Weights of a GGUF file under Hugging Face's names, dequantised tensor by tensor."""

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from configs.decoder import DecoderConfig
from configs.gguf_file import GGUFFile

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
}
"""llama.cpp's names -> Hugging Face's, without the part; `*` for the layer's number."""
QK_NORMS = {
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
}
OWN_NAMES = {
    "Qwen3ForCausalLM": QK_NORMS,
    "Phi3ForCausalLM": {
        "blk.*.attn_qkv": "model.layers.*.self_attn.qkv_proj",
        "blk.*.ffn_up": "model.layers.*.mlp.gate_up_proj",
    },
    "Gemma3ForCausalLM": QK_NORMS
    | {
        "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
        "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
        "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
    },
}
"""Names that an architecture adds or means otherwise."""
INTERLEAVED = ("LlamaForCausalLM",)
"""Architectures whose rows of Q and K llama.cpp's converter reorders."""
FREQUENCIES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""No weights: `RopeConfig` has them."""


class GGUFSource:
    """Raises `StartupError` for a type that is not read and for a file cut short."""

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    unreadable: Mapping[str, str]

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        self.where = str(path)
        self._config = config
        self._file = GGUFFile.read(path)
        self._file.check_tensors()
        names = NAMES | OWN_NAMES.get(config.architecture, {})
        tensors = self._file.tensors.items()
        self._tensors = {_name(name, names): tensor for name, tensor in tensors if name not in FREQUENCIES}
        self._data = np.memmap(path, mode="r").view(np.ndarray)  # slices of a memmap object itself are slow
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.unreadable = {}

    def read(self, name: str) -> torch.Tensor:
        """fp32, a fresh tensor."""
        tensor = self._tensors[name]
        data = self._data[tensor.offset : tensor.offset + self._file.bytes_of(tensor)]
        values = gguf.quants.dequantize(data.reshape(*tensor.shape[:-1], -1), Kind(tensor.type))
        if self._config.architecture in INTERLEAVED and ".attn_q." in tensor.name:
            values = _half_split(values, self._config.num_heads)
        elif self._config.architecture in INTERLEAVED and ".attn_k." in tensor.name:
            values = _half_split(values, self._config.num_kv_heads)
        elif self._config.zero_centred_norms and tensor.name.endswith("norm.weight"):
            values = values - np.float32(1.0)  # the file has what the norm multiplies by
        return torch.from_numpy(np.require(values, np.float32, ("C", "W")))


def _name(name: str, names: Mapping[str, str]) -> str:
    """Hugging Face's name of a tensor; the file's own where it has none, for the message about it."""
    stem, _, part = name.rpartition(".")
    layer = re.search(r"(?<=^blk\.)\d+", stem)
    pattern = re.sub(r"^blk\.\d+", "blk.*", stem)
    if pattern not in names:
        return name
    return f"{names[pattern]}.{part}".replace("*", layer.group() if layer else "*")


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q and K in the order (i, i + D/2) of Hugging Face; llama.cpp's converter interleaves the two halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
