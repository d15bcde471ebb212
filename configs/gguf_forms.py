"""How weights of linear layers that a GGUF file has in codes stay in memory: as codes, with scales for groups of them.

Types of 4 bits keep 4 bits a number, those of 5, 6 and 8 bits keep 8. Arithmetic only: the loader, the planner and the
start-up block ask here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from configs.gguf_file import TYPES, GGUFFile


@dataclass(frozen=True)
class CodeForm:
    """A number is scale x code + minimum."""

    bits: int
    """Of a code."""
    lowest: int
    """What a code of 4 bits begins at; those of 8 bits have a sign."""
    group: int
    """Inputs, of one output, that share scale and minimum."""
    scale_bytes: int
    """2: fp16, 4: fp32, which products of two scales need."""
    has_minimums: bool

    def bytes_of(self, numbers: int) -> int:
        """Memory of that many."""
        return numbers * self.bits // 8 + numbers // self.group * self.scale_bytes * (1 + self.has_minimums)


FORMS = {
    "Q4_0": CodeForm(4, -8, 32, 2, False),
    "Q4_1": CodeForm(4, 0, 32, 2, True),
    "Q5_0": CodeForm(8, 0, 32, 2, False),
    "Q5_1": CodeForm(8, 0, 32, 2, True),
    "Q8_0": CodeForm(8, 0, 32, 2, False),
    "Q4_K": CodeForm(4, 0, 32, 4, True),
    "Q5_K": CodeForm(8, 0, 32, 4, True),
    "Q6_K": CodeForm(8, 0, 16, 4, False),
}
"""Name of a type -> form. Others hold plain numbers."""


def form_of(type: int) -> CodeForm | None:
    """type: ggml's number of it."""
    kind = TYPES.get(type)
    return None if kind is None else FORMS.get(kind.name)


def common_form(forms: Iterable[CodeForm | None]) -> CodeForm | None:
    """The narrowest form that holds each exactly, of weights that become one; None: plain numbers are among them."""
    found: set[CodeForm] = set()
    for form in forms:
        if form is None:
            return None
        found.add(form)
    if not found:
        return None
    starts = {(form.bits, form.lowest) for form in found}
    bits, lowest = starts.pop() if len(starts) == 1 else (8, 0)
    return CodeForm(
        bits,
        lowest,
        min(form.group for form in found),
        max(form.scale_bytes for form in found),
        any(form.has_minimums for form in found),
    )


@dataclass(frozen=True)
class LayerForms:
    """Of the linear layers of one layer of the model. None: plain numbers."""

    qkv: CodeForm | None
    o: CodeForm | None
    gate_up: CodeForm | None
    down: CodeForm | None


@dataclass(frozen=True)
class StoredForms:
    """Of all linear layers of a model."""

    layers: tuple[LayerForms, ...]
    head: CodeForm | None

    @classmethod
    def of(cls, file: GGUFFile, num_layers: int) -> "StoredForms | None":
        """None: no linear layer can keep codes."""
        layers = tuple(
            LayerForms(**{part.name: _form(file, f"blk.{layer}.", PARTS[part.name]) for part in fields(LayerForms)})
            for layer in range(num_layers)
        )
        head = "output" if "output.weight" in file.tensors else "token_embd"
        found = cls(layers, _form(file, "", (head,)))
        every = [form for layer in layers for form in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return found if any((*every, found.head)) else None


PARTS = {
    "qkv": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
"""llama.cpp's names of what is fused, of those that a file has."""


def _form(file: GGUFFile, prefix: str, names: Iterable[str]) -> CodeForm | None:
    found = (file.tensors.get(f"{prefix}{name}.weight") for name in names)
    return common_form(form_of(tensor.type) for tensor in found if tensor is not None)
