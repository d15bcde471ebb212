"""Linear layers: several projections of one input fused into one packed weight."""

from collections.abc import Mapping

import torch

from configs.decoder import Activation
from engine.model.base import Loadable
from kernels import ops
from kernels.int8_weight import Int8Weight


class Linear(Loadable):
    """y = x W^T + b. Shards are row ranges of W in the order given; the weight is packed when the last row has come.
    The shard "" is all rows, for checkpoints that store them fused.

    With a gate, of two shards of one size the first gates the second: y = gate(x G^T) * (x U^T).

    Until then the rows gather in a plain buffer, given up once packed: loading needs one such buffer beside the model.
    Buffer and packed weight are on torch's default device as it is when the layer is made. After `quantise` the buffer
    is int8 already, made from the numbers of the checkpoint as they are.
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
        self.device = torch.get_default_device()
        self._rows: dict[str, slice] = {}
        start = 0
        for name, size in shards.items():
            self._rows[name] = slice(start, start + size)
            start += size
        self._rows[""] = slice(0, start)
        self._pending = dict.fromkeys(self.part_shapes(""), start)
        self._gathered: dict[str, torch.Tensor] = {}
        self._is_int8 = False
        self._codes: Int8Weight | None = None
        self._packed: ops.PackedLinear | None = None

    def quantise(self) -> None:
        """The weight will be kept in int8. To be called before any part comes."""
        assert not self._gathered and self._packed is None, "weights are there already"
        self._is_int8 = True

    def part_shapes(self, shard: str) -> dict[str, tuple[int, ...]]:
        rows = self._rows[shard]
        size = rows.stop - rows.start
        return {"weight": (size, self.in_features)} | ({"bias": (size,)} if self.has_bias else {})

    def load_part(self, shard: str, part: str, tensor: torch.Tensor) -> None:
        rows = self._rows[shard]
        if part == "weight" and self._is_int8:
            if self._codes is None:
                self._codes = Int8Weight.empty(self.out_features, self.in_features, self.device)
            self._codes.fill(rows, tensor)
        else:
            if part not in self._gathered:
                shape = (self.out_features, *tensor.shape[1:])
                self._gathered[part] = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._gathered[part][rows].copy_(tensor)
        self._pending[part] -= len(tensor)
        if not any(self._pending.values()):
            self._packed = self._pack()
            self._gathered, self._codes = {}, None

    def _pack(self) -> ops.PackedLinear:
        bias = self._gathered.get("bias")
        if self._codes is not None:
            return ops.pack_linear_int8(self._codes, self.dtype, bias, self.gate)
        return ops.pack_linear(self._gathered["weight"], bias, self.gate)

    @property
    def packed(self) -> ops.PackedLinear:
        """The weight as it is multiplied by."""
        assert self._packed is not None, "weights are not loaded"
        return self._packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features], half as many if gated"""
        return ops.linear(x, self.packed)
