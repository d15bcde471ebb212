"""The start-up's question whether company changes answers, asked of models that are and are not exact."""

import pytest
import torch
from engines import Engine, Loaded, Unsteady
from tiny_models import FALLBACKS, VARIANTS, build

from engine.runner import company


@pytest.fixture(scope="module", params=["gqa", "gemma3", "olmo2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    tiny = (VARIANTS | FALLBACKS)[request.param]
    return Loaded.load(build(tmp_path_factory.mktemp(request.param), tiny), torch.float32, 256)


def test_exact_models(loaded: Loaded) -> None:
    runner = Engine(loaded).executor.runner
    assert company.compare(runner) is None
    assert not any(pool.any() for pool in runner.pools) and not runner.rows.lengths.any()


def test_a_model_that_is_not(loaded: Loaded) -> None:
    runner = Engine(loaded).executor.runner
    runner.model = Unsteady(runner.model)
    assert company.compare(runner) is not None


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"num_blocks": 2}, {"chunk": 1, "max_num_seqs": 1}], ids=str)
def test_small_limits_leave_no_company(loaded: Loaded, limits: dict[str, int]) -> None:
    runner = Engine(loaded, **limits).executor.runner
    runner.model = Unsteady(runner.model)
    assert company.compare(runner) is None


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_blocks": 4}, {"chunk": 24, "max_num_seqs": 3}], ids=str)
def test_two_are_company(loaded: Loaded, limits: dict[str, int]) -> None:
    runner = Engine(loaded, **limits).executor.runner
    runner.model = Unsteady(runner.model)
    assert company.compare(runner) is not None
