"""From a path on disk to a model that runs."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from configs.model import FAMILIES, ModelConfig
from engine.model.base import CausalLM
from engine.model.gguf_weights import GGUFSource
from engine.model.weights import SafetensorsSource, WeightSource, load_weights


@torch.no_grad()
def load_model(
    path: Path, config: ModelConfig, dtype: torch.dtype, max_model_len: int, progress: Callable[[float], None]
) -> CausalLM:
    """The model in `path` (folder of safetensors or .gguf file), in eval mode and without gradients.

    `config` is `ModelConfig.from_source(path)`; `max_model_len` is the effective window, which fixes the rotary tables;
    `progress` gets the fraction loaded. Raises `StartupError` for weights that are missing, damaged or do not fit.
    """
    window = config.effective_window(max_model_len)
    source: WeightSource = GGUFSource(path, config) if path.is_file() else SafetensorsSource(path)
    module = import_module(f"engine.model.archs.{FAMILIES[config.architecture].module}")
    model: CausalLM = module.Model(config, dtype, window)
    load_weights(model, source, progress)
    return model.eval()
