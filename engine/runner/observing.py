"""A model reads a text and each layer's q, k and v are shown on their way to attention: what is to be known of K and V
before any request is found so.

    text ─> pieces, each at another place of the window ─> the model, as it serves ─> q, k, v of each layer ─> `See`

Rotary position encoding turns pairs of K's dims, some of them by far less than a full turn within a piece: so that
each dim shows all that it can be, pieces begin at places all over the window. Static scales from pieces that all begin
at 0 do not hold behind them: with SmolLM2, int8 and a scale for each channel, 700 tokens that begin at 3,000 were 0.7
nats a token from the answers of a plain cache, and below 0.01 with pieces spread out.
"""

from collections.abc import Callable, Sequence

import torch

from configs.kv import LayerKV
from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend, AttentionLayer, ForwardBatch
from engine.runner.solo import Solo

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Of the window, between one piece's place and the next one's, round and round: any number of them lie evenly."""

See = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Gets q [T, heads, head_dim], k and v [T, kv_heads, head_dim] of a layer, q and k rotated. It must not keep them."""


class ObservedAttention:
    """`AttentionBackend` that shows what it is given and hands it on."""

    def __init__(self, inner: AttentionBackend, see: See) -> None:
        self.inner, self.see = inner, see

    def forward(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        self.see(layer, q, k, v)
        return self.inner.forward(layer, q, k, v, batch)


def observe(
    model: CausalLM,
    plain: Sequence[LayerKV],
    pieces: Sequence[Sequence[int]],
    window: int,
    device: torch.device,
    see: See,
    report: Callable[[float], None] = lambda fraction: None,
) -> None:
    """plain: the model's layers in its own format; pieces: token ids, none longer than the window of so many tokens;
    report: gets the fraction that is read."""
    size = max(map(len, pieces), default=0)
    solo = Solo(model, plain, size, device)
    solo.attention = ObservedAttention(solo.attention, see)
    for number, (piece, place) in enumerate(zip(pieces, places(window, size, len(pieces)), strict=True)):
        report(number / len(pieces))
        solo.hidden(piece, place)
    report(1.0)


def places(window: int, size: int, count: int) -> list[int]:
    """Where `count` pieces of `size` tokens begin, all over the window."""
    return [int((window - size) * (number * GOLDEN_RATIO % 1.0)) for number in range(count)]
