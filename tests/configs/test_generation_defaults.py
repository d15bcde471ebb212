"""generation_config.json: the sampling values that a model's authors chose, in the bounds that a request has."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import StartupError
from configs.model import ModelConfig
from configs.supported import read_model
from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams


def read(folder: Path, generation: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": ["OlmoForCausalLM"], "vocab_size": 99}))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model(folder)


def test_generation_defaults(tmp_path: Path) -> None:
    values = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 99,
    }
    generation = read(tmp_path, {"do_sample": True, **values}).generation
    assert {key: getattr(generation, key) for key in values} == values
    assert read(tmp_path, {}).generation.temperature is None
    assert read(tmp_path, {"do_sample": False, "temperature": 0.55}).generation.temperature == 0.0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", -1, "between 0 and 2"),
        ("temperature", 2.1, "between 0 and 2"),
        ("temperature", "hot", "a number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_k", 2.5, "an integer of at least -1"),
        ("top_k", -2, "an integer of at least -1"),
        ("min_p", 1.1, "between 0 and 1"),
        ("repetition_penalty", 0, "between 0.01 and 100"),
        ("repetition_penalty", 1e9, "between 0.01 and 100"),
        ("max_new_tokens", 0, "an integer of at least 1"),
    ],
)
def test_senseless_generation_defaults(key: str, value: Any, words: str, tmp_path: Path) -> None:
    """What no request may have is no default either."""
    with pytest.raises(StartupError) as caught:
        read(tmp_path, {key: value})
    assert str(caught.value).endswith(f"generation_config.json: {key} must be {words}, got {value!r}.")
    with pytest.raises(InvalidRequest):
        SamplingParams(**{"max_tokens" if key == "max_new_tokens" else key: value})


@pytest.mark.parametrize("key", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_defaults_have_the_bounds_of_requests(key: str, tmp_path: Path) -> None:
    """Asked of both, on either side of each bound."""
    for value in (-1e-9, 0.0, 1e-9, 0.009, 0.01, 1.0, 1.0 + 1e-9, 2.0, 2.0 + 1e-9, 100.0, 100.1):
        taken = []
        for use in (lambda: SamplingParams(**{key: value}), lambda: read(tmp_path, {key: value})):  # noqa: B023
            try:
                use()
                taken.append(True)
            except (InvalidRequest, StartupError):
                taken.append(False)
        assert taken[0] == taken[1], value
