"""What a model's own files say of it, whoever runs it.

    config.json (+ generation_config.json) ─┐              ┌─ a family of ours ─> DecoderConfig ──────┐
                                            ├─> ModelFiles ┤                                          ├─ SizedConfig
    GGUF header ────────────────────────────┘              └─ any other ───────> TransformersConfig ──┘

Pure arithmetic and no torch: the API process reads it as well.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from configs.errors import StartupError
from configs.gguf_file import GGUFFile
from configs.kv import KVFormat, LayerKV
from configs.model_fields import Fields, read_json
from configs.model_gguf import gguf_fields
from configs.sampling_limits import RANGES

DType = Literal["bfloat16", "float16", "float32"]
ITEMSIZE: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
Quantization = Literal["auto", "none", "int8"]
"""What may be asked for the weights of linear layers. auto: none, but what a GGUF file has in codes stays as it is."""
WeightFormat = Literal["none", "int8", "stored"]
"""What they are kept in. none: the model's dtype; int8: with one scale for each output; stored: the codes of the file,
where it has any."""
MAX_WINDOW = 2**24
"""Tokens of a sequence: positions are tabulated, and the pages of a sequence named, for each of them. No published
model has more."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that the model's authors chose, used where a request names none; None: they chose none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """What the files say of any model."""

    architecture: str
    vocab_size: int
    dtype: DType | None
    """As declared; None where the file does not say."""
    generation: GenerationDefaults


@dataclass(frozen=True)
class SizedConfig(ModelConfig, ABC):
    """A model whose every size is known: what the pool, the KV layout and the start-up block compute with."""

    @property
    def title(self) -> str:
        """Architecture and size, in words."""
        millions = self.num_parameters / 1e6
        return f"{self.architecture}, {millions:.{0 if millions >= 10 else 2}f} million parameters"

    @property
    @abstractmethod
    def window(self) -> int:
        """Tokens of context served by default."""

    @property
    @abstractmethod
    def max_window(self) -> int:
        """Tokens of context that may be asked for."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Numbers stored in the checkpoint; a tied head counts once."""

    @property
    def has_codes(self) -> bool:
        """Weights of linear layers can be kept in codes of the file."""
        return False

    @property
    def has_sinks(self) -> bool:
        """Attention of some layer has sinks."""
        return False

    def weight_format(self, asked: Quantization, is_gpu: bool) -> WeightFormat:
        """On a GPU, which has no kernel of its own for codes in groups, those of a file are unpacked."""
        if asked != "auto":
            return asked
        return "stored" if self.has_codes and not is_gpu else "none"

    @abstractmethod
    def weight_bytes(self, dtype: DType, quantization: WeightFormat = "none") -> int:
        """Memory of the loaded weights. Raises `StartupError` where the model cannot be quantised."""

    def table_bytes(self, window: int) -> int:
        """Memory of what is tabulated at load for every position up to `window`."""
        return 0

    @abstractmethod
    def kv_layers(self, format: KVFormat) -> tuple[LayerKV, ...]:
        """What each attention layer keeps of a token."""

    def effective_window(self, requested: int | None) -> int:
        """`requested`, or the model's own window. Raises `StartupError` where the model cannot have that many, and for
        more than anything here is made for."""
        most = min(self.max_window, MAX_WINDOW)
        if requested is None and self.window > most:
            raise StartupError(
                f"--model: the window that it declares, {self.window} tokens, is too long: at most {most} are served; "
                "say how many with --max-model-len."
            )
        if requested is not None and not 1 <= requested <= most:
            raise StartupError(f"--max-model-len {requested} is not possible: this model takes 1 to {most} tokens.")
        return self.window if requested is None else requested


@dataclass(frozen=True)
class ModelFiles:
    """A model folder's or a GGUF file's metadata."""

    config: Fields
    """Under the keys of config.json, a GGUF's too."""
    generation: GenerationDefaults
    gguf: GGUFFile | None

    @classmethod
    def read(cls, path: Path) -> "ModelFiles":
        """Raises `StartupError` for what is missing or cannot be read."""
        gguf = None
        if path.is_file():
            gguf = GGUFFile.read(path)
            config, generation = gguf_fields(gguf)
        elif not path.exists():
            raise StartupError(f"--model: {path} does not exist.")
        else:
            config = read_json(path / "config.json")
            generation = read_json(path / "generation_config.json", needed=False)
        return cls(config, _generation(generation), gguf)

    @property
    def architecture(self) -> str:
        return architecture(self.config)


def architecture(config: Fields) -> str:
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    name = str(first or config.get("model_type") or "no architecture")
    return name.encode("utf-8", "replace").decode()  # JSON may hold halves of characters


def declared_dtype(config: Fields) -> DType | None:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    for name in get_args(DType):
        if config.get(key) == name:
            return name  # type: ignore[no-any-return]
    if config.get(key) is not None:
        raise config.wrong(key, f"one of {', '.join(get_args(DType))}")
    return None


def _generation(given: Fields) -> GenerationDefaults:
    """`do_sample: false`, written out, asks for greedy choice; a file that says nothing of it does not."""

    def optional(key: str) -> float | None:
        """In the bounds that a request has."""
        if given.get(key) is None:
            return None
        value = given.number(key, low=-math.inf)
        if value not in RANGES[key]:
            raise given.wrong(key, str(RANGES[key]))
        return value

    greedy = given.get("do_sample") is False
    top_k, max_new = given.get("top_k"), given.get("max_new_tokens")
    return GenerationDefaults(
        temperature=0.0 if greedy else optional("temperature"),
        top_p=optional("top_p"),
        top_k=None if top_k is None else given.integer("top_k", low=int(RANGES["top_k"].low)),
        min_p=optional("min_p"),
        repetition_penalty=optional("repetition_penalty"),
        max_new_tokens=None if max_new is None else given.integer("max_new_tokens"),
    )
