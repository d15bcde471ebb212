"""Weights from disk into a model, one tensor at a time; all names and shapes are checked before the first is read.

Memory: the model, one tensor and one fused weight. Safetensors files are mapped, not read; GGUF is in `gguf_weights`.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from configs.gguf_forms import CodeForm, common_form
from configs.model_fields import read_weight_map
from engine.errors import StartupError
from engine.model.base import Architecture, Destination
from engine.model.layers.linear import Linear
from kernels.grouped_weight import GroupedWeight

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
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


class CodeSource(Protocol):
    """The same checkpoint, where linear layers can keep weights in its codes."""

    forms: Mapping[str, CodeForm]
    """Of the weights that are in codes."""

    def read_codes(self, name: str) -> GroupedWeight:
        """One of those, in its form: a fresh one."""


def load_weights(
    model: Architecture, source: WeightSource, progress: Callable[[float], None], codes: CodeSource | None = None
) -> None:
    """Fills every module of `model`; calls `progress` with the fraction of numbers loaded.

    With `codes` a linear layer keeps those, unless it fuses weights of which one has none. A tied head keeps those of
    the embedding.

    Raises `StartupError` naming the weight that is missing, unexpected, of another shape or damaged.
    """
    destinations = model.destinations()
    tied = model.config.tie_word_embeddings and HEAD not in source.shapes
    head = destinations.pop(HEAD) if tied else destinations[HEAD]
    _check(destinations, source)
    keepers = {} if codes is None else _keepers(destinations, codes.forms)
    total = sum(_count(destination.shape) for destination in destinations.values())
    done = 0
    for name, destination in destinations.items():
        if codes is not None and name in keepers:
            keepers[name].load_codes(destination.shard, codes.read_codes(name))
        else:
            destination.load(source.read(name))
        done += _count(destination.shape)
        progress(done / total)
    if not tied:
        return
    if codes is not None and EMBEDDING in codes.forms:
        [layer] = _keepers({EMBEDDING: head}, codes.forms).values()
        layer.load_codes(head.shard, codes.read_codes(EMBEDDING))
    else:
        model.tie_head()


def _keepers(destinations: Mapping[str, Destination], forms: Mapping[str, CodeForm]) -> dict[str, Linear]:
    """Tells linear layers whose weights all have a form to keep codes. Names of those weights -> layer."""
    names_of: dict[Linear, list[str]] = {}
    for name, destination in destinations.items():
        if isinstance(destination.module, Linear) and destination.part == "weight":
            names_of.setdefault(destination.module, []).append(name)
    keepers: dict[str, Linear] = {}
    for layer, names in names_of.items():
        form = common_form(forms.get(name) for name in names)
        if form is not None:
            layer.keep_codes(form)
            keepers |= dict.fromkeys(names, layer)
    return keepers


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
