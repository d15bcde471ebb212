"""Scales that are fixed beforehand: what K and V of each head and dim are divided by before they are stored.

A file holds, in safetensors, for each layer N of a model two fp32 tensors [kv_heads, head_dim], `layers.N.k` and
`layers.N.v`, and says among its metadata for which model and formats they are. `octavo calibrate` writes one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from configs.errors import StartupError, reason_of
from configs.kv import KVFormat, LayerKV
from engine.runner.kv_store import Shapings
from kernels import ops

KIND = "octavo-kv-scales-1"
"""Stands in the metadata of every such file, under "kind"."""


@dataclass(frozen=True)
class KVScales:
    """Of all layers of a model."""

    architecture: str
    formats: tuple[KVFormat, KVFormat]
    """For which (K, V) they were made."""
    granularity: str
    """"channel": one for each head and dim; "tensor": the same for a whole layer's K, and for its V."""
    num_tokens: int
    """Of the text from which they were found."""
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(of K, of V) of each layer, fp32 [kv_heads, head_dim]."""

    def save(self, path: Path) -> None:
        """Raises `StartupError`."""
        tensors = {
            f"layers.{number}.{half}": tensor.contiguous()
            for number, both in enumerate(self.layers)
            for half, tensor in zip("kv", both, strict=True)
        }
        metadata = {
            "kind": KIND,
            "architecture": self.architecture,
            "k_format": self.formats[0].value,
            "v_format": self.formats[1].value,
            "granularity": self.granularity,
            "num_tokens": str(self.num_tokens),
        }
        try:
            save_file(tensors, path, metadata)
        except (OSError, SafetensorError) as error:
            raise StartupError(f"--out {path} cannot be written: {reason_of(error)}.") from error

    @classmethod
    def load(cls, path: Path) -> "KVScales":
        """Raises `StartupError` for what is no such file."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                names = set(file.keys())
                count = len(names) // 2
                if metadata.get("kind") != KIND or names != {
                    f"layers.{n}.{half}" for n in range(count) for half in "kv"
                }:
                    raise StartupError(f"--kv-cache-scales {path} holds no scales that octavo calibrate has written.")
                layers = tuple(
                    (file.get_tensor(f"layers.{n}.k"), file.get_tensor(f"layers.{n}.v")) for n in range(count)
                )
            return cls(
                metadata["architecture"],
                (KVFormat(metadata["k_format"]), KVFormat(metadata["v_format"])),
                metadata["granularity"],
                int(metadata["num_tokens"]),
                layers,
            )
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StartupError(f"--kv-cache-scales {path} cannot be read: {reason_of(error)}.") from error

    def shapings(
        self, path: Path, architecture: str, layers: Sequence[LayerKV], device: torch.device
    ) -> list[Shapings]:
        """For each of `layers` (of `configs.kv_flags.kv_layers`) what its store divides by, on the device.

        Raises `StartupError` where the file is of another model or of other formats.
        """

        def refuse(words: str) -> StartupError:
            return StartupError(
                f"--kv-cache-scales {path} {words}: run octavo calibrate again, with this model and this "
                "--kv-cache-dtype."
            )

        if self.architecture != architecture:
            raise refuse(f"is of another model ({self.architecture}, and this one is {architecture})")
        if len(self.layers) != len(layers):
            raise refuse(f"is of another model (it has {len(self.layers)} layers, and this one has {len(layers)})")
        found = []
        for number, (layer, both) in enumerate(zip(layers, self.layers, strict=True)):
            shape = (layer.kv_heads, layer.head_dim)
            halves = []
            for name, format, made_for, tensor in zip("KV", layer.formats, self.formats, both, strict=True):
                if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
                    raise refuse(
                        f"is of another model (layer {number} has {' x '.join(map(str, tensor.shape))} scales, and "
                        f"{layer.kv_heads} heads of {layer.head_dim} numbers here)"
                    )
                if not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
                    raise refuse(f"has senseless scales in layer {number}")
                is_static = layer.static and format.may_be_static
                if is_static and format is not made_for:
                    raise refuse(f"is for {made_for.value}, and {name} is kept in {format.value}")
                halves.append(ops.Shaping(tensor.to(device)) if is_static else ops.NO_SHAPING)
            found.append((halves[0], halves[1]))
        return found
