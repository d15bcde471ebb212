"""Scales that are fixed beforehand: what K and V of each head and dim are divided by before they are stored.

A file holds, in safetensors, for each layer N of a model two fp32 tensors [kv_heads, head_dim], `layers.N.k` and
`layers.N.v`, and says among its metadata for which model and formats they are. `octavo calibrate` writes one. Whoever
is given one (the engine, the doctor, the planner) asks `scales_of`, so that all refuse the same in the same words.
"""

import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from configs.errors import StartupError, reason_of, shown
from configs.kv import KVFormat, LayerKV
from configs.kv_flags import kv_layers
from configs.model import DType, SizedConfig
from configs.settings import Settings

KIND = "octavo-kv-scales-1"
"""Stands in the metadata of every such file, under "kind"."""
METADATA: dict[str, Callable[[str], Any]] = {
    "architecture": str,
    "k_format": KVFormat,
    "v_format": KVFormat,
    "granularity": str,
    "num_tokens": int,
}
"""What else stands there, and how it is read."""

Scales = NDArray[np.float32]


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
    layers: tuple[tuple[Scales, Scales], ...]
    """(of K, of V) of each layer, fp32 [kv_heads, head_dim]."""

    def save(self, path: Path) -> None:
        """Raises `StartupError`."""
        tensors = {
            f"layers.{number}.{half}": scales
            for number, both in enumerate(self.layers)
            for half, scales in zip("kv", both, strict=True)
        }
        values = (self.architecture, *(format.value for format in self.formats), self.granularity, str(self.num_tokens))
        metadata = {"kind": KIND, **dict(zip(METADATA, values, strict=True))}
        try:
            path.write_bytes(save(tensors, metadata))
        except OSError as error:
            raise StartupError(f"--out {path} cannot be written: {error.strerror}.") from None

    @classmethod
    def load(cls, path: Path) -> "KVScales":
        """Raises `StartupError` for what is no such file."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise StartupError(f"--kv-cache-scales {path} is not a regular file.")
            with safe_open(path, "np") as file:
                found, names = file.metadata() or {}, set(file.keys())
                count = len(names) // 2
                if found.get("kind") != KIND or names != {f"layers.{n}.{half}" for n in range(count) for half in "kv"}:
                    raise StartupError(f"--kv-cache-scales {path} holds no scales that octavo calibrate has written.")
                values = [_value(path, found, key) for key in METADATA]
                for name in sorted(names):
                    if (dtype := file.get_slice(name).get_dtype()) != "F32":
                        raise StartupError(
                            f"--kv-cache-scales {path} has {name} in {dtype}, and scales are read in F32: run octavo "
                            "calibrate again."
                        )
                layers = tuple(
                    (file.get_tensor(f"layers.{n}.k"), file.get_tensor(f"layers.{n}.v")) for n in range(count)
                )
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or reason_of(error)
            raise StartupError(f"--kv-cache-scales {path} cannot be read: {reason}.") from None
        architecture, k_format, v_format, granularity, num_tokens = values
        return cls(architecture, (k_format, v_format), granularity, num_tokens, layers)

    def check(self, path: Path, architecture: str, layers: Sequence[LayerKV]) -> None:
        """Whether they fit `layers` (of `configs.kv_flags.kv_layers`).

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
        for number, (layer, both) in enumerate(zip(layers, self.layers, strict=True)):
            for name, format, made_for, scales in zip("KV", layer.formats, self.formats, both, strict=True):
                if scales.shape != (layer.kv_heads, layer.head_dim):
                    raise refuse(
                        f"is of another model (layer {number} has {' x '.join(map(str, scales.shape))} scales, and "
                        f"{layer.kv_heads} heads of {layer.head_dim} numbers here)"
                    )
                if not bool((np.isfinite(scales) & (scales > 0)).all()):
                    raise refuse(f"has senseless scales in layer {number}")
                if layer.static and format.may_be_static and format is not made_for:
                    raise refuse(f"is for {made_for.value}, and {name} is kept in {format.value}")


def scales_of(settings: Settings, model: SizedConfig, dtype: DType) -> KVScales | None:
    """Of the file --kv-cache-scales, which fit; None without one. dtype: what the model computes in.

    Raises `StartupError`, which names the flag to change.
    """
    if settings.kv_cache_scales is None:
        return None
    path, layers = Path(settings.kv_cache_scales), kv_layers(settings, model, dtype)
    scales = KVScales.load(path)
    scales.check(path, model.architecture, layers)
    return scales


def _value(path: Path, metadata: dict[str, str], key: str) -> Any:
    try:
        return METADATA[key](metadata[key])
    except (KeyError, ValueError):
        raise StartupError(
            f"--kv-cache-scales {path} holds no scales that octavo calibrate has written: {key} among its metadata is "
            f"{shown(metadata[key]) if key in metadata else 'missing'}."
        ) from None
