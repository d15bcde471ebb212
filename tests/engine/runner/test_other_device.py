"""The path of a GPU, as far as a CPU can walk it: a model whose every tensor is where it was told to be, and whole
engines with the batches' copy, the kernels and the attention that serve a GPU."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import static_kernels
import tiny_models
import torch
from engines import CPU, Engine, Loaded
from late_device import LateDevice
from msgspec import structs
from tiny_models import FAMILIES, VARIANTS

from configs.model import Quantization
from configs.supported import read_model
from engine.messages import NewRow, StepPlan
from engine.model.registry import load_model
from engine.runner.device_inputs import DeviceInputs
from engine.runner.request_rows import RequestRows
from engine.runner.sampling.parameters import SamplingColumns
from engine.runner.sampling.sampler import Sampler
from engine.runner.warm_up import warm_up
from engine.sampling_params import SamplingParams
from kernels import ops, reference
from kernels.reference import attention

META = torch.device("meta")
PROMPTS = [[(7 * i * i + 3 * i + 1) % 256 for i in range(length)] for length in (61, 3, 30, 17)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class AttentionThere:
    """Attention that looks where its tensors are, and answers with one of the right shape."""

    def forward(self, layer, q, k, v, batch):
        assert q.device == k.device == v.device == batch.slot_mapping[0].device == META
        return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_wholly_on_its_device(name: str, quantization: Quantization, tmp_path: Path) -> None:
    """On the device without memory: mixing it with the CPU is an error, and so is a way back."""
    folder = tiny_models.build(tmp_path, VARIANTS[name])
    config = read_model(folder)
    model = load_model(folder, config, torch.bfloat16, 64, lambda fraction: None, META, quantization)
    assert {buffer.device for buffer in model.buffers()} == {META}
    assert torch.get_default_device() == CPU, "no trace of it is left in the process"
    rows, device = RequestRows(2, 64, 16), LateDevice()
    inputs = DeviceInputs(rows, SamplingColumns(2, config.vocab_size, ()), config.vocab_size, 64, META, device)
    row = NewRow(1, "a", list(range(9)), 9, SamplingParams(), 0, [[5]], 0)
    rows.admit(row, config.vocab_size)
    empty = {"new_rows": [row], "new_blocks": [], "copies": [], "transfers": [], "freed_slots": []}
    plan = StepPlan(step=0, slots=[1], num_tokens=[9], samples=[True], **empty)
    batch = inputs.batch(inputs.stage(plan))
    device.catch_up()
    assert device.num_sends == 1
    with torch.inference_mode():
        logits = model.logits(model.hidden(batch, AttentionThere()))
    assert logits.device == META and logits.shape == (1, config.vocab_size) and logits.dtype is torch.float32


def test_position_tables_have_the_same_bits_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed on the CPU: what another device makes of a cosine does not matter."""
    folder = tiny_models.build(tmp_path)
    computed = []
    cos = torch.Tensor.cos
    monkeypatch.setattr(torch.Tensor, "cos", lambda x: computed.append(x.device) or cos(x))
    load_model(folder, read_model(folder), torch.float32, 64, lambda fraction: None, META)
    assert set(computed) == {CPU}


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *itertools.product(FAMILIES, ["auto", "int8"]),
        *((name, "int4") for name in ("head-dim", "qwen3", "gemma3")),  # whose heads 32 divides
    ],
)
def test_what_serves_a_gpu_gives_the_same_tokens(
    name: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few bits too, with keys that were fitted on the same path."""
    folder = tiny_models.build(tmp_path, VARIANTS[name])
    on_cpu = replace(Loaded.load(folder, torch.float32, 128), kv={"kv_cache_dtype": format})
    expected = Engine(on_cpu, chunk=64).run(PROMPTS, GREEDY)
    monkeypatch.setattr(ops, "_serve", lambda op, *where: getattr(reference, op))
    monkeypatch.setattr(ops, "draw", static_kernels.draw, raising=False)
    monkeypatch.setattr(attention, "attend_alone", attention.attend_together)
    loaded = replace(on_cpu)
    fits, fits_on_cpu = ([vars(k) for k, _ in each.transforms] for each in (loaded, on_cpu))
    torch.testing.assert_close(fits, fits_on_cpu, atol=1e-5, rtol=1e-5)
    assert any(fit["feedback"] is not None for fit in fits) == (format != "auto")
    device = LateDevice(1)
    engine = Engine(loaded, chunk=64, link=device)
    warm_up(engine.executor, largest=True)
    assert [result.token_ids for result in engine.run(PROMPTS, GREEDY)] == [one.token_ids for one in expected]
    assert device.num_sends > 8
    assert Engine(loaded, chunk=7, link=LateDevice(2)).run(PROMPTS[:1], GREEDY)[0].token_ids == expected[0].token_ids


def test_logits_that_the_device_lost_are_nobody_in_particulars_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's logits that cannot be fetched end the engine, rather than fail its requests one by one for ever."""
    device = LateDevice()
    engine = Engine(Loaded.load(tiny_models.build(tmp_path), torch.float32, 128), link=device)
    fetch = device.fetch

    def lost(source: torch.Tensor) -> Callable[[], torch.Tensor]:
        if source.dim() == 1:
            return fetch(source)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device, "fetch", lost)
    monkeypatch.setattr(ops, "draw", static_kernels.draw)
    assert engine.run(PROMPTS[:1], GREEDY)[0].finish_reason == "length"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.run(PROMPTS, structs.replace(GREEDY, logprobs=1))


@pytest.mark.parametrize(("device", "asked"), [(CPU, [52, 48]), (META, [100])])
def test_a_device_is_asked_for_many_rows_of_a_prompt_at_a_time(device: torch.device, asked: list[int]) -> None:
    """Each time it reads the head's weights once more, and everybody waits for it."""
    logits, counts = torch.randn(100, 40_000), []
    sampler = Sampler(RequestRows(256, 16, 2), 40_000, ())

    def head(hidden: torch.Tensor) -> torch.Tensor:
        counts.append(len(hidden))
        return logits[sum(counts[:-1]) : sum(counts)]

    ids = np.arange(100)
    found = sampler.score(torch.empty(100, 8, device=device), head, ids, 0)
    assert counts == asked and len(found) == 100
    expected = torch.log_softmax(logits, 1)[ids, ids]
    torch.testing.assert_close(torch.tensor([each.logprob for each in found]), expected, atol=1e-5, rtol=0)
