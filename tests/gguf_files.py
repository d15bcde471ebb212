"""GGUF files as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from configs.decoder import DecoderConfig
from configs.model_gguf import GGUF_ARCHITECTURES
from configs.supported import read_model

Extra = Callable[[gguf.GGUFWriter], object]
K_SCALES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
"""Types that the gguf package cannot write -> where in a block its fp16 numbers are."""


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Q and K rows as llama.cpp's converter permutes them: halves of a head become neighbours."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


FILE_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "gate_up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Last piece of Hugging Face's name -> llama.cpp's, as its converter renames."""


def file_name(name: str, architecture: str) -> str:
    """Hugging Face's name -> llama.cpp's."""
    stem, _, part = name.rpartition(".")
    names = FILE_NAMES | (GEMMA_NAMES if architecture == "gemma3" else {})
    layer = next((piece for piece in stem.split(".") if piece.isdigit()), None)
    own = names.get(stem) or names[stem.rpartition(".")[2]]
    return f"{own}.{part}" if layer is None else f"blk.{layer}.{own}.{part}"


def random_blocks(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """A matrix of a K type: random codes with sane scales."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    for start in K_SCALES[kind]:
        scales = generator.uniform(0.0001, 0.0002, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., start : start + 2] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: Path,
    folder: Path,
    kind: Kind | Callable[[str], Kind],
    drop: str = "",
    extra: Extra = lambda writer: None,
) -> Path:
    """The model in `folder` as a GGUF file, matrices stored as `kind`, or as it says of their names, and vectors as
    F32."""
    config = read_model(folder)
    architecture = next(name for name, (theirs, _) in GGUF_ARCHITECTURES.items() if theirs == config.architecture)
    writer = gguf.GGUFWriter(path, architecture)
    write_header(writer, config)
    extra(writer)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == drop:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, config.num_heads if ".q_proj." in name else config.num_kv_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1.0
        own_name, stored = file_name(name, architecture), Kind.F32
        if values.ndim == 2:
            stored = kind(own_name) if callable(kind) else kind
        raw = random_blocks(values.shape, stored) if stored in K_SCALES else gguf.quants.quantize(values, stored)
        writer.add_tensor(own_name, raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_header(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    """The keys that llama.cpp's converter writes for the architecture."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    if writer.arch != "phi3":
        writer.add_key_length(config.head_dim)
    if writer.arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(config.rotary_dim)
    if writer.arch in ("gemma3", "phi3"):
        writer.add_sliding_window(max(filter(None, config.layer_windows), default=0))
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(259)
