"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama whose checkpoint has fused weights."""

from collections.abc import Mapping

from engine.model.archs import llama

FUSED = {
    "model.layers.*.self_attn.qkv_proj": ("layers.*.attention.qkv", ""),
    "model.layers.*.mlp.gate_up_proj": ("layers.*.mlp.gate_up", ""),
}
PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class Model(llama.Model):
    @property
    def weight_map(self) -> Mapping[str, tuple[str, str]]:
        return {name: place for name, place in llama.WEIGHTS.items() if not name.endswith(PARTS)} | FUSED
