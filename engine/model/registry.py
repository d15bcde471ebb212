"""From a path on disk to a model that runs."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from configs.decoder import FAMILIES, DecoderConfig
from configs.model import SizedConfig, WeightFormat
from configs.supported import read_model
from engine.model.base import Architecture, CausalLM
from engine.model.layers.linear import Linear
from engine.model.weights import SafetensorsSource, load_weights
from kernels.registry import AUTO

CPU = torch.device("cpu")


def read_config(path: Path, trust_remote_code: bool) -> SizedConfig:
    """Every size of the model in `path` (folder or .gguf file). Raises `StartupError` for one that cannot be served.

    trust_remote_code: Python files in the folder may be run, where the library transformers has no such class.
    """
    config = read_model(path)
    if isinstance(config, DecoderConfig):
        return config
    from engine.model.fallback.config import read_transformers_config  # imports transformers: seconds

    return read_transformers_config(path, config, trust_remote_code)


@torch.no_grad()
def load_model(
    path: Path,
    config: SizedConfig,
    dtype: torch.dtype,
    max_model_len: int,
    progress: Callable[[float], None],
    device: torch.device = CPU,
    quantization: WeightFormat = "none",
    backend: str = AUTO,
) -> CausalLM:
    """The model in `path` (folder of safetensors or .gguf file), in eval mode and without gradients.

    `config` is `read_config`'s; `max_model_len` is the effective window, which fixes the rotary tables; `progress` gets
    the fraction loaded. Every weight goes to `device` as it is read (of a class of transformers, once it is whole), and
    is packed for it there. quantization: of linear layers, in architectures of ours; backend: who computes them
    (`ops.pack_linear`). Raises `StartupError` for
    weights that are missing, damaged or do not fit.
    """
    window = config.effective_window(max_model_len)
    if not isinstance(config, DecoderConfig):
        from engine.model.fallback.config import TransformersConfig
        from engine.model.fallback.load import load_transformers_model

        assert isinstance(config, TransformersConfig) and quantization == "none"  # else `weight_bytes` has refused
        assert backend == AUTO, backend
        return load_transformers_model(config, dtype, window, progress, device)
    gguf = None
    if path.is_file():
        from engine.model.gguf_weights import GGUFSource  # imports the library gguf: other files need none

        gguf = GGUFSource(path, config)
    source = gguf or SafetensorsSource(path)
    module = import_module(f"engine.model.archs.{FAMILIES[config.architecture].module}")
    with torch.device(device):
        model: Architecture = module.Model(config, dtype, window)
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.backend = backend
            if quantization == "int8":
                layer.quantise()
    load_weights(model, source, progress, gguf if quantization == "stored" else None)
    return model.eval()
