"""The start-up's question whether company changes answers, asked of models that are and are not exact."""

from dataclasses import replace
from pathlib import Path

import pytest
import static_kernels
import torch
from engines import Engine, Loaded, Unsteady
from late_device import LateDevice
from tiny_models import FALLBACKS, VARIANTS, build

from engine.runner import company
from engine.runner.warm_up import warm_up


@pytest.fixture(scope="module", params=["gqa", "gemma3", "olmo2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    tiny = (VARIANTS | FALLBACKS)[request.param]
    return Loaded.load(build(tmp_path_factory.mktemp(request.param), tiny), torch.float32, 256)


def test_exact_models(loaded: Loaded) -> None:
    executor = Engine(loaded).executor
    runner = executor.runner
    assert company.compare(executor) is None
    assert not any(pool.any() for pool in runner.pools) and not runner.rows.lengths.any()


def test_a_model_that_is_not(loaded: Loaded) -> None:
    executor = Engine(loaded).executor
    executor.runner.model = Unsteady(executor.runner.model)
    assert company.compare(executor) is not None


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"num_blocks": 2}, {"chunk": 1, "max_num_seqs": 1}], ids=str)
def test_small_limits_leave_no_company(loaded: Loaded, limits: dict[str, int]) -> None:
    executor = Engine(loaded, **limits).executor
    executor.runner.model = Unsteady(executor.runner.model)
    assert company.compare(executor) is None


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_blocks": 4}, {"chunk": 24, "max_num_seqs": 3}], ids=str)
def test_two_are_company(loaded: Loaded, limits: dict[str, int]) -> None:
    executor = Engine(loaded, **limits).executor
    executor.runner.model = Unsteady(executor.runner.model)
    assert company.compare(executor) is not None


@pytest.mark.parametrize("captured", [False, True])
def test_a_device_that_the_host_runs_ahead_of_is_asked_too(captured: bool, tmp_path: Path) -> None:
    """The last token alone by a captured step, where there are any."""
    with static_kernels.served():
        loaded = Loaded.load(build(tmp_path), torch.float32, 128)
        for model, is_exact in ((loaded.model, True), (Unsteady(loaded.model), False)):
            device = LateDevice()
            executor = Engine(replace(loaded, model=model), link=device).executor
            warm_up(executor, largest=True)
            if captured:
                executor.capture([1, 2])
            assert (company.compare(executor) is None) == is_exact
            assert device.num_replays == int(captured)
            device.catch_up()
            assert not any(pool.any() for pool in executor.runner.pools) and not executor.rows.lengths.any()
