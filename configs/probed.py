"""A model that the library transformers runs, by its sizes: a probe has read them off the library's own code.

engine.model.fallback ── as_text ──> another process without torch ── ProbedConfig.of ──> SizedConfig
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from configs.errors import StartupError
from configs.kv import KVFormat, LayerKV
from configs.model import ITEMSIZE, DType, ModelConfig, SizedConfig, WeightFormat


@dataclass(frozen=True)
class LayerCall:
    """What one attention layer asked for."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    has_sinks: bool = False


@dataclass(frozen=True)
class ProbedConfig(SizedConfig):
    windows: tuple[int, int]
    """Tokens of context: by default, and at most."""
    calls: tuple[LayerCall, ...]
    parameters: int
    """Numbers stored; a tied head counts once."""
    tied_parameters: int
    """Numbers of a head that is the embedding's table too: it is packed, a second copy."""

    @classmethod
    def of(cls, declared: ModelConfig, text: str) -> "ProbedConfig":
        """`declared`: what the files say; `text`: of `as_text`."""
        sizes: dict[str, Any] = json.loads(text)
        return cls(
            architecture=declared.architecture,
            vocab_size=sizes["vocab_size"],
            dtype=declared.dtype,
            generation=declared.generation,
            windows=(sizes["windows"][0], sizes["windows"][1]),
            calls=tuple(LayerCall(**call) for call in sizes["calls"]),
            parameters=sizes["parameters"],
            tied_parameters=sizes["tied_parameters"],
        )

    def as_text(self) -> str:
        """JSON."""
        names = ("vocab_size", "windows", "parameters", "tied_parameters")
        return json.dumps({name: getattr(self, name) for name in names} | {"calls": [*map(asdict, self.calls)]})

    @property
    def title(self) -> str:
        return f"{super().title}, through transformers' own code"

    @property
    def window(self) -> int:
        return self.windows[0]

    @property
    def max_window(self) -> int:
        return self.windows[1]

    @property
    def num_parameters(self) -> int:
        return self.parameters

    @property
    def has_sinks(self) -> bool:
        return any(call.has_sinks for call in self.calls)

    def weight_bytes(self, dtype: DType, quantization: WeightFormat = "none") -> int:
        if quantization != "none":
            raise StartupError(
                f"--quantization {quantization} is for architectures that Octavo has code of its own for. "
                f"{self.architecture} is run by transformers' code, parts of which multiply by weights themselves: "
                "leave the flag out."
            )
        return (self.parameters + self.tied_parameters) * ITEMSIZE[dtype]

    def kv_layers(self, format: KVFormat) -> tuple[LayerKV, ...]:
        """A window that no sequence can exceed is none."""
        return tuple(
            LayerKV(
                call.kv_heads,
                call.head_dim,
                format,
                None if call.window is None or call.window >= self.max_window else call.window,
            )
            for call in self.calls
        )
