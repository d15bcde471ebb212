"""Weights from disk into a model, one tensor at a time; all names and shapes are checked before the first is read.

Memory: the model, one tensor and one fused weight. Safetensors files are mapped, not read; GGUF is in `gguf_weights`.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from configs.model_fields import read_weight_map
from engine.errors import StartupError
from engine.model.base import Architecture, Destination

INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.gguf")
FLOATS = {"BF16", "F16", "F32"}
"""Kinds of numbers that are read, as safetensors calls them."""
MAX_NAMED = 3
"""Weights named in a message before it says how many more there are."""


class WeightSource(Protocol):
    """A checkpoint on disk, under the names of Hugging Face's checkpoints."""

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    unreadable: Mapping[str, str]
    """Weight name -> kind of its numbers, of those whose kind is not read."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in any float dtype; may be a view of the mapped file. Raises `StartupError` if it is damaged."""


def load_weights(model: Architecture, source: WeightSource, progress: Callable[[float], None]) -> None:
    """Fills every module of `model`; calls `progress` with the fraction of numbers loaded.

    Raises `StartupError` naming the weight that is missing, unexpected, of another shape or damaged.
    """
    destinations = model.destinations()
    if model.config.tie_word_embeddings and HEAD not in source.shapes:
        del destinations[HEAD]
    _check(destinations, source)
    total = sum(_count(destination.shape) for destination in destinations.values())
    done = 0
    for name, destination in destinations.items():
        destination.load(source.read(name))
        done += _count(destination.shape)
        progress(done / total)
    if HEAD not in destinations:
        model.tie_head()


def _check(destinations: Mapping[str, Destination], source: WeightSource) -> None:
    if missing := [name for name in destinations if name not in source.shapes]:
        raise StartupError(f"--model: {source.where} lacks {named(missing)}: it is incomplete or of another kind.")
    unexpected = [name for name in source.shapes if name not in destinations and not ignorable(name)]
    if unexpected:
        raise StartupError(
            f"--model: {source.where} holds {named(unexpected)}, which this architecture does not have: the file "
            f"and the configuration do not belong together."
        )
    for name, destination in destinations.items():
        if source.shapes[name] != destination.shape:
            raise StartupError(
                f"--model: {source.where}: {name} has shape {list(source.shapes[name])}, the configuration asks for "
                f"{list(destination.shape)}."
            )
    check_kinds(source, destinations)


def check_kinds(source: WeightSource, names: Iterable[str]) -> None:
    """Raises `StartupError` for a weight among `names` that is stored as numbers of a kind that is not read."""
    for name in names:
        if name in source.unreadable:
            kind = source.unreadable[name]
            raise StartupError(f"--model: {source.where}: {name} is stored as {kind}; bf16, fp16 and fp32 are read.")


def ignorable(name: str) -> bool:
    """Tables that old checkpoints carry along; ours are computed."""
    return name.endswith("rotary_emb.inv_freq")


def named(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more weights" if more > 0 else "")


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


# ------------------------------------------------------------------ safetensors
class SafetensorsSource:
    """One file, or several with or without an index. Raises `StartupError` for what is missing or damaged."""

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    unreadable: Mapping[str, str]

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        index = read_weight_map(folder / INDEX) if (folder / INDEX).exists() else None
        shapes: dict[str, tuple[int, ...]] = {}
        kinds: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        """Weight name -> open file that holds it"""
        for path in _files(folder, index):
            file = _open(path)
            for name in list(file.keys()):
                if index is not None and index.get(name) != path.name:
                    continue
                if name in self._files:
                    raise StartupError(f"--model: {folder}: {name} is in more than one file, and there is no {INDEX}.")
                self._files[name] = file
                part = file.get_slice(name)
                shapes[name], kinds[name] = tuple(part.get_shape()), part.get_dtype()
        for name, file_name in (index or {}).items():
            if name not in shapes:
                raise StartupError(f"--model: {folder}: {INDEX} says that {name} is in {file_name}, but it is not.")
        self.shapes = shapes
        self.unreadable = {name: kind for name, kind in kinds.items() if kind not in FLOATS}

    def read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise StartupError(f"--model: {self.where}: {name} cannot be read: {error}.") from None
        return tensor


def _files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        paths = [folder / name for name in sorted(set(index.values()))]
        if absent := [path.name for path in paths if not path.exists()]:
            raise StartupError(
                f"--model: {folder} lacks {named(absent)}, named in {INDEX}: the download is incomplete."
            )
        return paths
    single = folder / "model.safetensors"
    paths = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if paths:
        return paths
    others = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
    if others:
        raise StartupError(
            f"--model: {folder} holds no safetensors, only {named(others)}: give a folder with *.safetensors, or the "
            f"path of a .gguf file."
        )
    raise StartupError(f"--model: {folder} holds no weights (*.safetensors).")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StartupError(f"--model: {path} is damaged or incomplete ({error}): download it again.") from None
