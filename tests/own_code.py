"""A model that the library transformers does not have: its folder holds its code."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.olmo2.modeling_olmo2 import eager_attention_forward


class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=260, hidden_size=32, num_hidden_layers=2, max_position_embeddings=128, **others):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**others)


class Block(nn.Module):
    num_key_value_groups = 1

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer_idx = config, layer
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, x, cache, **others):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, q, k, v, others.pop("mask"), scaling=q.shape[-1] ** -0.5, **others)
        return x + out.reshape(x.shape) SUM


class OwnPreTrained(PreTrainedModel):
    config_class = OwnConfig
    _supports_attention_backend = True
    base_model_prefix = "model"

    def _init_weights(self, module):
        pass


class OwnModel(OwnPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.place = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, position_ids=None, cache=None, use_cache=None, **others):
        kept = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = kept + torch.arange(input_ids.shape[1])[None]
        mask = None
        if self.config._attn_implementation == "eager":
            total = kept + input_ids.shape[1]
            mask = torch.full((input_ids.shape[1], total), float("-inf")).triu(1 + kept)[None, None]
        x = self.embed(input_ids) + self.place(position_ids)
        for block in self.blocks:
            x = block(x, cache, mask=mask, **others)
        return BaseModelOutputWithPast(last_hidden_state=x)


class OwnForCausalLM(OwnPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, inputs_embeds=None, cache=None, **others):
        x = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, cache=cache, **others).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(x))
"""


def own_model(folder: Path, sum_of: str = "") -> Path:
    """A model whose code is in its folder. sum_of: what its blocks add beside attention."""
    (folder / "own.py").write_text(CODE.replace("SUM", sum_of))
    config = {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
        "vocab_size": 260,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.embed.weight": (260, 32), "model.place.weight": (128, 32), "lm_head.weight": (260, 32)}
    for layer in range(2):
        shapes |= {f"model.blocks.{layer}.qkv.weight": (96, 32), f"model.blocks.{layer}.qkv.bias": (96,)}
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
