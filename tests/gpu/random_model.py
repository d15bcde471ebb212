"""Models of a given shape with random weights, as folders that the engine loads: no network, no tokenizer."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu.turns import in_turn
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int = 40960

    @property
    def config(self) -> dict[str, object]:
        """config.json. No token ends a sequence."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.window,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
        }

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name in a layer -> (outputs, inputs)"""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    @property
    def norms(self) -> dict[str, int]:
        """Name in a layer -> width"""
        return {
            "input_layernorm": self.hidden,
            "post_attention_layernorm": self.hidden,
            "self_attn.q_norm": self.head_dim,
            "self_attn.k_norm": self.head_dim,
        }


QWEN3_06B = Shape(1024, 3072, 28, 16, 8, 128, 151936)
TINY = Shape(64, 96, 2, 4, 2, 32, 300, window=512)


def write(folder: Path, shape: Shape, device: torch.device) -> Path:
    """Makes the model in `folder`, unless it is there, and returns it. bf16; weights are drawn on `device`. Of several
    processes one makes it, and the others wait."""
    with in_turn(folder):
        if not (folder / "model.safetensors").exists():
            _make(folder, shape, device)
    return folder


def _make(folder: Path, shape: Shape, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(size[-1] ** -0.5).bfloat16().cpu()

    tensors = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        for name, size in shape.linears.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*size)
        for name, width in shape.norms.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    (folder / "config.json").write_text(json.dumps(shape.config))
    partial = folder / "partial"
    save_file(tensors, partial, {"format": "pt"})
    partial.rename(folder / "model.safetensors")
