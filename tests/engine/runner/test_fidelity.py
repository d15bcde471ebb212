"""One sequence in pages of its own, and how far formats move a model's answers."""

import random
from dataclasses import replace

import pytest
import torch
from engines import Engine, Loaded
from tiny_models import FALLBACKS, VARIANTS, build

from engine.model.interface import ForwardBatch
from engine.runner import fidelity
from engine.runner.fidelity import Fidelity, Trial
from engine.runner.solo import Solo
from engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
IDS = random.Random(3).choices(range(256), k=100)


@pytest.fixture(scope="module", params=["gqa", "gemma3", "cohere2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    tiny = (VARIANTS | FALLBACKS)[request.param]
    return Loaded.load(build(tmp_path_factory.mktemp(request.param), tiny), torch.float32, 256)


def in_format(loaded: Loaded, name: str) -> Loaded:
    return replace(loaded, kv={"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": "none"})


@pytest.mark.parametrize("name", ["auto", "int8", "fp8"])
def test_a_sequence_by_itself_is_the_engines(loaded: Loaded, name: str) -> None:
    """Windows are shorter than the text; chunks change no bit."""
    loaded = in_format(loaded, name)
    score = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    [scored] = Engine(loaded).run([IDS], score)
    solo = Solo(loaded.model, loaded.kv_layers, len(IDS), CPU, loaded.transforms)
    hidden = [solo.hidden(IDS, chunk=chunk) for chunk in (None, 7)]
    assert torch.equal(*hidden)
    logits = loaded.model.logits(hidden[0]).log_softmax(dim=-1)
    found = logits[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, torch.tensor([at.logprob for at in scored.prompt_logprobs]), rtol=0, atol=1e-5)


def test_positions_may_begin_anywhere(loaded: Loaded) -> None:
    seen: list[ForwardBatch] = []
    solo = Solo(loaded.model, loaded.kv_layers, len(IDS), CPU)
    inner, hidden = solo.attention.forward, []

    def noting(*asked: object) -> torch.Tensor:
        seen.append(asked[4])
        return inner(*asked)

    solo.attention.forward = noting
    for place in (0, 100):
        hidden.append(solo.hidden(IDS, place))
        assert seen[-1].positions.tolist() == list(range(place, place + 100))
    torch.testing.assert_close(*hidden, rtol=2e-3, atol=2e-3)  # positions are relative


def test_measures_grow_as_bits_go(loaded: Loaded) -> None:
    trial = Trial(loaded.model, loaded.kv_layers, IDS, CPU, chunk=64)
    nothing, int8, e5m2 = (
        trial.measure(in_format(loaded, name).kv_layers, None) for name in ("auto", "int8", "fp8_e5m2")
    )
    assert nothing == Fidelity(0.0, 1.0, 100) and not nothing.is_nonsense
    assert 0 < int8.divergence < e5m2.divergence and e5m2.agreement < 1


def test_the_measure_is_what_it_says(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside torch's own KL divergence, whatever the rows at a time."""
    layers = in_format(loaded, "fp8_e5m2").kv_layers
    expected, found = (
        loaded.model.logits(Solo(loaded.model, kept, len(IDS), CPU).hidden(IDS)).log_softmax(dim=-1)
        for kept in (loaded.kv_layers, layers)
    )
    divergence = torch.nn.functional.kl_div(found, expected, reduction="batchmean", log_target=True)
    for rows in (16, 1000):
        monkeypatch.setattr(fidelity, "ROWS", rows)
        measured = Trial(loaded.model, loaded.kv_layers, IDS, CPU, chunk=64).measure(layers, None)
        assert measured.divergence == pytest.approx(float(divergence), rel=1e-3)
        assert measured.agreement == int((expected.argmax(-1) == found.argmax(-1)).sum()) / len(IDS)


def test_numbers_that_are_not_finite_are_nonsense() -> None:
    assert Fidelity(float("nan"), 1.0, 1).is_nonsense and Fidelity(float("inf"), 1.0, 1).is_nonsense
    assert not Fidelity(0.249, 0.0, 1).is_nonsense and Fidelity(0.251, 1.0, 1).is_nonsense
