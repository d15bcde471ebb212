"""The head of a GGUF file: metadata and where each tensor lies. No tensor is read here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). The `gguf` package
reads it too, but makes a numpy view of every string of the vocabulary: 2.5 s for 50 thousand tokens against 0.1 s here.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from configs.errors import StartupError, reason_of

GGUFScalar = int | float | bool | str
GGUFValue = GGUFScalar | list["GGUFValue"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct code"""


@dataclass(frozen=True)
class GGUFType:
    """How numbers are stored: in blocks of `numbers`, each of `num_bytes`."""

    name: str
    numbers: int
    num_bytes: int


TYPES = {
    0: GGUFType("F32", 1, 4),
    1: GGUFType("F16", 1, 2),
    30: GGUFType("BF16", 1, 2),
    2: GGUFType("Q4_0", 32, 18),
    3: GGUFType("Q4_1", 32, 20),
    6: GGUFType("Q5_0", 32, 22),
    7: GGUFType("Q5_1", 32, 24),
    8: GGUFType("Q8_0", 32, 34),
    12: GGUFType("Q4_K", 256, 144),
    13: GGUFType("Q5_K", 256, 176),
    14: GGUFType("Q6_K", 256, 210),
}
"""ggml type number -> how it is stored, of those that are read (`gguf.GGML_QUANT_SIZES` has all)."""
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of those that are not."""


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch; the file has it the other way round."""
    type: int
    """ggml type number: 0 F32, 1 F16, 2 Q4_0, …"""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, GGUFValue]
    tensors: dict[str, GGUFTensor]
    size: int
    """Bytes of the whole file."""

    @classmethod
    def read(cls, path: Path) -> "GGUFFile":
        """Raises `StartupError` for a file that is missing, damaged, cut short, or of another format or version."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                metadata, tensors = _Reader(buffer, path).head()
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise StartupError(f"--model: {path} cannot be read as GGUF: {reason_of(error)}.") from None
        except (struct.error, IndexError, OverflowError, MemoryError, RecursionError):
            words = "is damaged or incomplete: its header ends early; fetch it again"
            raise StartupError(f"--model: {path} {words}.") from None
        return cls(path, metadata, {tensor.name: tensor for tensor in tensors}, size)

    def check_tensors(self) -> None:
        """Raises `StartupError` where a tensor cannot be read, or the file ends before it does."""
        for tensor in self.tensors.values():
            if tensor.offset + self.bytes_of(tensor) > self.size:
                words = f"is incomplete: it ends at byte {self.size}, before {tensor.name} does; fetch it again"
                raise StartupError(f"--model: {self.path} {words}.")

    def bytes_of(self, tensor: GGUFTensor) -> int:
        """Raises `StartupError` for a type that is not read and a shape that is not of whole blocks."""
        kind = TYPES.get(tensor.type)
        if kind is None:
            found = OTHER_TYPES.get(tensor.type, f"type {tensor.type}")
            known = ", ".join(kind.name for kind in TYPES.values())
            raise StartupError(f"--model: {self.path}: {tensor.name} is stored as {found}; read are {known}.")
        if not tensor.shape or tensor.shape[-1] % kind.numbers:
            raise StartupError(f"--model: {self.path} is damaged: {tensor.name} has shape {list(tensor.shape)}.")
        return math.prod(tensor.shape) // kind.numbers * kind.num_bytes


class _Reader:
    """Walks the header once."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.position = buffer, path, 0

    def head(self) -> tuple[dict[str, GGUFValue], list[GGUFTensor]]:
        if self.buffer[:4] != MAGIC:
            raise StartupError(f"--model: {self.path} is not a GGUF file (it does not begin with 'GGUF').")
        self.position = 4
        version = self.integer("I")
        if version not in VERSIONS:
            raise StartupError(f"--model: {self.path} is GGUF version {version}; little-endian 2 and 3 are read.")
        num_tensors, num_values = self.integer("Q"), self.integer("Q")
        metadata: dict[str, GGUFValue] = {}
        for _ in range(num_values):
            key = self.string()
            metadata[key] = self.value(self.integer("I"))
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise StartupError(f"--model: {self.path}: general.alignment must be positive, got {alignment!r}.")
        start = -(-self.position // alignment) * alignment
        return metadata, [GGUFTensor(name, shape, kind, start + offset) for name, shape, kind, offset in entries]

    def integer(self, code: str) -> int:
        (value,) = self.unpack(code)
        return int(value)

    def unpack(self, codes: str) -> tuple[GGUFScalar, ...]:
        values = struct.unpack_from("<" + codes, self.buffer, self.position)
        self.position += struct.calcsize("<" + codes)
        return values

    def string(self) -> str:
        length = self.integer("Q")
        end = self.position + length
        if end > len(self.buffer):
            raise IndexError
        text = self.buffer[self.position : end].decode("utf-8", "replace")
        self.position = end
        return text

    def value(self, kind: int) -> GGUFValue:
        if kind in SCALARS:
            return self.unpack(SCALARS[kind])[0]
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise StartupError(f"--model: {self.path} is damaged: metadata value of unknown type {kind}.")
        item, count = self.integer("I"), self.integer("Q")
        if count > len(self.buffer):  # every item takes a byte at least
            raise IndexError
        if item in SCALARS:
            return list(self.unpack(f"{count}{SCALARS[item]}"))
        return [self.value(item) for _ in range(count)]

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = self.integer("I")
        if dims > 8:
            raise IndexError
        shape = tuple(int(size) for size in reversed(self.unpack(f"{dims}Q")))
        return name, shape, self.integer("I"), self.integer("Q")
