"""A text is read in pieces all over the window, and what attention is given is shown."""

from pathlib import Path

import torch
from engines import Loaded
from tiny_models import FALLBACKS, VARIANTS, build

from engine.model.interface import AttentionLayer
from engine.runner.observing import observe, places
from engine.runner.solo import Solo

CPU = torch.device("cpu")


def test_places_lie_all_over_the_window() -> None:
    found = places(1000, 64, 8)
    assert found[0] == 0 and all(0 <= place <= 1000 - 64 for place in found)
    assert max(b - a for a, b in zip(sorted(found), [*sorted(found)[1:], 1000], strict=True)) < 250
    assert places(64, 64, 3) == [0, 0, 0]


def test_every_layer_of_every_piece_is_seen_once(tmp_path: Path) -> None:
    """As it would be without an observer, at the place of its piece."""
    loaded = Loaded.load(build(tmp_path, VARIANTS["gqa"]), torch.float32, 512)
    pieces, seen, fractions = [[*range(40)], [*range(40, 80)], [7, 8, 9]], [], []

    def see(layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        seen.append((layer.index, q.clone(), k.clone(), v.clone()))

    observe(loaded.model, loaded.kv_layers, pieces, 512, CPU, see, fractions.append)
    layers = len(loaded.kv_layers)
    assert [index for index, *_ in seen] == [*range(layers)] * 3 and fractions == [0, 1 / 3, 2 / 3, 1]
    assert [len(k) for _, _, k, _ in seen] == [40] * layers * 2 + [3] * layers
    starts = places(512, 40, 3)
    assert starts[2] > 0
    again = []
    solo = Solo(loaded.model, loaded.kv_layers, 40, CPU)
    inner = solo.attention.forward
    solo.attention.forward = lambda layer, q, k, v, batch: (again.append((q, k, v)), inner(layer, q, k, v, batch))[1]
    solo.hidden(pieces[2], starts[2])
    for (_, *found), expected in zip(seen[-layers:], again, strict=True):
        assert all(map(torch.equal, found, expected))


def test_what_bends_scores_is_seen_with_the_layer(tmp_path: Path) -> None:
    def asked(name: str) -> AttentionLayer:
        loaded, seen = Loaded.load(build(tmp_path / name, FALLBACKS[name]), torch.float32, 512), []
        observe(loaded.model, loaded.kv_layers, [[1, 2, 3]], 512, CPU, lambda layer, *_: seen.append(layer))
        return seen[0]

    gemma2, gpt_oss = asked("gemma2"), asked("gpt_oss")
    assert gemma2.softcap == 2.0 and gemma2.sinks is None
    assert gpt_oss.softcap is None and gpt_oss.sinks is not None and gpt_oss.sinks.dtype == torch.float32
