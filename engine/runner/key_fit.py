"""What is done to a model's keys before they are rounded to few bits, found from a text before any request.

    text ─> the model, as it serves (`engine.runner.observing`) ─> moments of K and Q ─> `KVTransform`

A rounded key costs what its error adds to scores, q . error. So for each layer and key/value head:

    centre    the mean of K. It adds the same to all scores of a query, and in models whose keys have biases it is most
              of them.
    channels  the square root of K's spread in each dim: wide dims do not take all the codes, narrow ones not all the
              error, since queries are wide where keys are not.
    feedback  queries lie in few directions, and an error that none of them sees costs nothing: each dim's error is made
              up for by the dims after it. With H the second moments of Q as it meets what is stored, and inverse(H) =
              U' U, U upper triangular, dim j > i gets error x U[i, j] / U[i, i] subtracted. (GPTQ, Frantar et al. 2023;
              LDLQ in QuIP, Chee et al. 2023: for weights.)

K is looked at as it is stored, after the rotation by position. Where the plain torch kernel stores keys (without a C++
compiler, or on a GPU without Triton) there is no feedback: dim by dim is too many operations there.
"""

from collections.abc import Sequence

import torch

from configs.kv import LayerKV
from engine.model.base import CausalLM
from engine.model.interface import AttentionLayer
from engine.runner.kv_store import UNTRANSFORMED, KVTransforms
from engine.runner.observing import observe
from kernels import ops, reference
from kernels.reference import kv_formats
from kernels.registry import choose

PIECE = 128
"""Tokens of the text that see each other."""
DAMPING = 0.03
"""Of the mean of H's diagonal, added to it: directions in which the text has no queries count that much."""
TINY = 1e-4
"""The width of a dim that did not vary at all."""
NARROWEST = 2.0**-10
"""Of the widest dim of its head: a dim that hardly varied in the text counts as this wide."""


class KeyFit:
    """What was found of a model's keys, for caches of any formats."""

    def __init__(self, moments: Sequence["LayerMoments"]) -> None:
        """moments: of each of the model's layers."""
        self._moments = moments

    @classmethod
    def of(
        cls, model: CausalLM, plain: Sequence[LayerKV], token_ids: Sequence[int], window: int, device: torch.device
    ) -> "KeyFit":
        """plain: the model's layers in its own format; token_ids: of the text; window: tokens."""
        size = min(PIECE, window)
        pieces = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
        moments = [LayerMoments() for _ in plain]

        def see(layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            moments[layer.index].add(q, k)
            moments[layer.index].is_bent = layer.softcap is not None or layer.sinks is not None

        observe(model, plain, pieces, window, device, see)
        return cls(moments)

    def transforms(self, layers: Sequence[LayerKV]) -> list[KVTransforms]:
        """Of each of `layers`: of keys with scales of their own, and of nothing else."""
        return [
            (self._moments[number].transform(layer), ops.NO_TRANSFORM) if layer.fits_keys else UNTRANSFORMED
            for number, layer in enumerate(layers)
        ]


class LayerMoments:
    """Sums over the tokens that a layer has seen, fp64."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.k: torch.Tensor | float = 0.0
        """[kv_heads, head_dim]"""
        self.k_squares: torch.Tensor | float = 0.0
        """The same."""
        self.q_products: torch.Tensor | float = 0.0
        """[kv_heads, head_dim, head_dim], over the query heads of each."""
        self.dtype = torch.float32
        """In which the model hands its keys over."""
        self.is_bent = False
        """Whether scores go through a soft cap, or sinks stand beside them: then a centre would show."""

    def add(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """q: [T, heads, head_dim]; k: [T, kv_heads, head_dim]"""
        self.num_tokens, self.dtype = self.num_tokens + len(k), k.dtype
        self.k = self.k + k.double().sum(dim=0)
        self.k_squares = self.k_squares + k.double().square().sum(dim=0)
        by_head = q.float().view(len(q), k.shape[1], -1, q.shape[2]).transpose(0, 1).flatten(1, 2)
        self.q_products = self.q_products + (by_head.mT @ by_head).double()

    def transform(self, layer: LayerKV) -> ops.KVTransform:
        """None at all where there was no text, or the model's numbers were not finite."""
        if not self.num_tokens:
            return ops.NO_TRANSFORM
        k, squares, products = (torch.as_tensor(x).cpu() for x in (self.k, self.k_squares, self.q_products))
        if not all(bool(x.isfinite().all()) for x in (k, squares, products)):
            return ops.NO_TRANSFORM
        mean = torch.zeros_like(k) if self.is_bent else k / self.num_tokens
        width = (squares / self.num_tokens - mean.square()).clamp_min(0).sqrt()
        width = torch.maximum(width, width.amax(dim=-1, keepdim=True) * NARROWEST).clamp_min(TINY)
        channels = width.sqrt()
        device = torch.as_tensor(self.k).device
        shares = None
        if choose("store_kv", device.type, self.dtype, layer.formats).name != reference.NAME:
            met = products * channels.unsqueeze(-1) * channels.unsqueeze(-2)  # by what is stored
            shares = feedback(kv_formats.rotate(kv_formats.rotate(met).mT))
        found = (channels, None if self.is_bent else mean, shares)
        return ops.KVTransform(*(None if x is None else x.float().contiguous().to(device) for x in found))


def feedback(products: torch.Tensor) -> torch.Tensor:
    """products: H, fp64 [..., D, D] -> fp64 [..., D, D], of which entries above the diagonal count."""
    dims = products.shape[-1]
    damping = DAMPING * products.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    damped = products + damping[..., None, None] * torch.eye(dims, dtype=products.dtype)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    shares: torch.Tensor = upper / upper.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return shares
