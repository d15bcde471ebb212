"""Linear layers: several projections of one input fused into one packed weight."""

from collections.abc import Callable, Mapping

import torch

from configs.decoder import Activation
from configs.gguf_forms import CodeForm
from engine.model.base import Loadable
from kernels import ops
from kernels.grouped_weight import GroupedWeight
from kernels.int8_weight import Int8Weight
from kernels.registry import AUTO


class Linear(Loadable):
    """y = x W^T + b. Shards are row ranges of W in the order given; the weight is packed when the last row has come.
    The shard "" is all rows, for checkpoints that store them fused.

    With a gate, of two shards of one size the first gates the second: y = gate(x G^T) * (x U^T).

    Until then the rows gather in a plain buffer, given up once packed: loading needs one such buffer beside the model.
    Buffer and packed weight are on torch's default device as it is when the layer is made. After `quantise` the buffer
    is int8 already, made from the numbers of the checkpoint as they are; after `keep_codes` it takes the codes that the
    checkpoint has.
    """

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        gate: Activation | None = None,
    ) -> None:
        """shards: name -> rows (output features)."""
        super().__init__()
        self.in_features, self.out_features = in_features, sum(shards.values())
        self.has_bias, self.dtype, self.gate = bias, dtype, gate
        self.backend = AUTO
        """Of `ops.pack_linear`; a weight in codes has one only. To be set before the last part comes."""
        self.device = torch.get_default_device()
        self._rows: dict[str, slice] = {}
        start = 0
        for name, size in shards.items():
            self._rows[name] = slice(start, start + size)
            start += size
        self._rows[""] = slice(0, start)
        self._pending = dict.fromkeys(self.part_shapes(""), start)
        self._gathered: dict[str, torch.Tensor] = {}
        self._make_codes: Callable[[], ops.CodedWeight] | None = None
        self._codes: ops.CodedWeight | None = None
        self._packed: ops.PackedLinear | None = None

    def quantise(self) -> None:
        """The weight will be kept in int8. To be called before any part comes."""
        self._keep(lambda: Int8Weight.empty(self.out_features, self.in_features, self.device))

    def keep_codes(self, form: CodeForm) -> None:
        """The weight will be kept in groups of codes, and comes so. To be called before any part comes."""
        self._keep(lambda: self._empty(form))

    def _keep(self, make: Callable[[], ops.CodedWeight]) -> None:
        assert not self._gathered and self._packed is None, "weights are there already"
        self._make_codes = make

    def _empty(self, form: CodeForm) -> GroupedWeight:
        outputs, inputs = self.out_features, self.in_features
        kind = torch.float16 if form.scale_bytes == 2 else torch.float32
        codes = torch.empty((outputs, inputs), dtype=torch.int8, device=self.device)
        scales = torch.empty((outputs, inputs // form.group), dtype=kind, device=self.device)
        minimums = torch.empty_like(scales) if form.has_minimums else None
        return GroupedWeight(codes, scales, minimums, form.bits, form.lowest)

    def part_shapes(self, shard: str) -> dict[str, tuple[int, ...]]:
        rows = self._rows[shard]
        size = rows.stop - rows.start
        return {"weight": (size, self.in_features)} | ({"bias": (size,)} if self.has_bias else {})

    def load_part(self, shard: str, part: str, tensor: torch.Tensor) -> None:
        rows = self._rows[shard]
        if part == "weight" and self._make_codes is not None:
            self._codes = self._codes or self._make_codes()
            assert isinstance(self._codes, Int8Weight), "this layer takes codes"
            self._codes.fill(rows, tensor)
        else:
            if part not in self._gathered:
                shape = (self.out_features, *tensor.shape[1:])
                self._gathered[part] = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._gathered[part][rows].copy_(tensor)
        self._came(part, rows)

    def load_codes(self, shard: str, weight: GroupedWeight) -> None:
        """`load_part` of a weight in codes, after `keep_codes`."""
        assert self._make_codes is not None, "this layer takes numbers"
        codes = self._codes or self._make_codes()
        assert isinstance(codes, GroupedWeight), "this layer takes numbers"
        if self._rows[shard] == self._rows[""] and weight.is_like(codes):
            codes = weight  # no second copy of a large one
        else:
            codes.fill(self._rows[shard], weight)
        self._codes = codes
        self._came("weight", self._rows[shard])

    def _came(self, part: str, rows: slice) -> None:
        self._pending[part] -= rows.stop - rows.start
        if not any(self._pending.values()):
            self._packed = self._pack()
            self._gathered, self._codes = {}, None

    def _pack(self) -> ops.PackedLinear:
        bias = self._gathered.get("bias")
        if self._codes is not None:
            return ops.pack_coded_linear(self._codes, self.dtype, bias, self.gate)
        return ops.pack_linear(self._gathered["weight"], bias, self.gate, self.backend)

    @property
    def packed(self) -> ops.PackedLinear:
        """The weight as it is multiplied by."""
        assert self._packed is not None, "weights are not loaded"
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features], half as many if gated"""
        return ops.linear(x, self.packed)
