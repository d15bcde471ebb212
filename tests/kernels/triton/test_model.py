"""Whole engines as on a GPU: every op by whom the registry names for one, the host ahead of a device that is late. Each
request gets the tokens that plain torch gives it alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engines import Engine, Loaded
from late_device import LateDevice
from tiny_models import VARIANTS

from configs.kv import KVFormat, KVOrder
from engine.model.registry import load_model
from engine.sampling_params import SamplingParams
from kernels import ops, reference
from kernels.registry import AUTO, INVARIANT, candidates, choose_among
from kernels.triton import offers

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=7, max_tokens=4, ignore_eos=True)
ASKED = {21: GREEDY, 1: DRAWN, 34: GREEDY}
"""By the prompt's length. The longest one is computed in two chunks."""
USED = {"gather_rows", "rms_norm", "add_rms_norm", "norm_rotary", "store_kv", "paged_attention", "draw"}


def prompt(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 1) % 256 for i in range(length)]


def engine(loaded: Loaded) -> Engine:
    return Engine(loaded, link=LateDevice(seed=1), max_num_seqs=4, num_blocks=64, chunk=24)


@pytest.mark.parametrize(
    ("name", "format", "backend"),
    [
        ("qwen3", "auto", AUTO),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("gemma3", "int8", AUTO), ("qwen3", "int4", AUTO), ("qwen3", "auto", INVARIANT))
        ),
    ],
)
def test_tokens_are_those_of_plain_torch(
    name: str, format: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """backend: of linear layers."""
    used = set()

    def as_on_a_gpu(
        op: str, tensor: torch.Tensor, formats: tuple[KVFormat, KVFormat] | None = None, backend: str = AUTO
    ) -> Callable[..., Any]:
        choice = choose_among(candidates(op), op, "cuda", tensor.dtype, formats, backend)
        used.update({op} if choice.name == offers.NAME else ())
        return choice.function

    monkeypatch.setattr(offers, "refusal", lambda: None)
    monkeypatch.setattr(KVOrder, "of", lambda is_gpu: KVOrder.ROWS)
    monkeypatch.setattr(ops, "_serve", lambda op, *where: getattr(reference, op))
    loaded = Loaded.load(tiny_models.build(tmp_path, VARIANTS[name]), torch.float32, window=96)
    loaded = replace(loaded, kv={"kv_cache_dtype": format})
    alone = [engine(loaded).run([prompt(length)], params)[0].token_ids for length, params in ASKED.items()]
    monkeypatch.setattr(ops, "_serve", as_on_a_gpu)
    if backend == INVARIANT:
        folder = tiny_models.build(tmp_path, VARIANTS[name])
        model = load_model(folder, loaded.config, loaded.dtype, 96, lambda fraction: None, backend=backend)
        loaded = replace(loaded, model=model)
    together = engine(loaded).run([prompt(length) for length in ASKED], list(ASKED.values()))
    assert [one.token_ids for one in together] == alone
    assert used == USED | ({"pack_linear"} if backend == INVARIANT else set())
