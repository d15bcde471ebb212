"""Weights of a GGUF file under Hugging Face's names: tensor by tensor dequantised, or their codes."""

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from configs.decoder import DecoderConfig
from configs.gguf_file import GGUFFile, GGUFTensor
from configs.gguf_forms import CodeForm, form_of
from engine.model.gguf_codes import read_codes
from kernels.grouped_weight import GroupedWeight

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
    forms: Mapping[str, CodeForm]

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
        found = {name: form_of(tensor.type) for name, tensor in self._tensors.items()}
        self.forms = {name: form for name, form in found.items() if form is not None}

    def read(self, name: str) -> torch.Tensor:
        """fp32, a fresh tensor."""
        tensor = self._tensors[name]
        values = gguf.quants.dequantize(self._bytes_of(tensor), Kind(tensor.type))
        if heads := self._interleaved_heads(tensor):
            values = _half_split(values, heads)
        elif self._config.zero_centred_norms and tensor.name.endswith("norm.weight"):
            values = values - np.float32(1.0)  # the file has what the norm multiplies by
        return torch.from_numpy(np.require(values, np.float32, ("C", "W")))

    def read_codes(self, name: str) -> GroupedWeight:
        tensor = self._tensors[name]
        weight = read_codes(self._bytes_of(tensor), tensor.type)
        if heads := self._interleaved_heads(tensor):
            return weight.rows(torch.from_numpy(_half_split(np.arange(tensor.shape[0]), heads)))
        return weight

    def _bytes_of(self, tensor: GGUFTensor) -> np.ndarray:
        """uint8 [outputs, bytes of a row]"""
        data = self._data[tensor.offset : tensor.offset + self._file.bytes_of(tensor)]
        return data.reshape(*tensor.shape[:-1], -1)

    def _interleaved_heads(self, tensor: GGUFTensor) -> int:
        """Heads whose rows llama.cpp's converter reordered; 0: it did not."""
        if self._config.architecture not in INTERLEAVED:
            return 0
        of = {"attn_q": self._config.num_heads, "attn_k": self._config.num_kv_heads}
        return of.get(tensor.name.split(".")[-2], 0)


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
