"""What the joining of parts says and reckons: exactness, and pools on the CPU and on a GPU."""

from pathlib import Path

import pytest
import tiny_models
import torch
from engines import Engine, Loaded, Unsteady

from configs.settings import Settings
from engine import build
from engine.device import GPU, Device, NoGPU
from engine.errors import StartupError
from engine.messages import AddRequest, Launch
from engine.model.registry import read_config
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams

GIB = 2**30
GPU_OF_8_GIB = GPU("a GPU", (8, 6), 8 * GIB, 8 * GIB, has_bfloat16=True)


def device_of(found: GPU | NoGPU, **given: object) -> Device:
    return Device.find(Settings(dtype="float32", **given), lambda: found)


CPU = device_of(NoGPU("", False))


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    return Engine(Loaded.load(tiny_models.build(tmp_path), torch.float32, 128)).executor.runner


def test_a_model_that_company_changes_is_warned_of(runner: ModelRunner, caplog) -> None:
    runner.model = Unsteady(runner.model)
    said = build._exactness(runner, CPU)
    assert "may be changed a little by other requests" in said and "(the model: other bits in steps of" in said
    assert said in caplog.text


def test_a_machine_whose_linears_are_not_exact_is_warned_of(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    assert build._exactness(runner, CPU).startswith("not changed by other requests") and not caplog.text
    monkeypatch.setattr(build, "inexact", lambda layers, dtype: {"model.layers.0.o": "other bits with one thread"})
    said = build._exactness(runner, CPU)
    assert said.startswith("may be changed a little") and "model.layers.0.o: other bits with one thread" in said
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.name == "octavo.engine" and said in record.getMessage()


def test_a_gpu_is_not_said_to_be_exact(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "inexact", lambda layers, dtype: pytest.fail("nothing is multiplied to find out"))
    said = build._exactness(runner, device_of(GPU_OF_8_GIB))
    assert said == "may be changed a little by other requests, since rounding differs (not checked on a GPU)"


def test_the_start_up_block_names_the_device_and_its_kernels(tmp_path: Path) -> None:
    config = read_config(tiny_models.build(tmp_path), trust_remote_code=False)
    device = device_of(GPU_OF_8_GIB)
    settings = Settings(num_gpu_blocks_override=64)
    _, plan = build.plan_pool(settings, config, device)
    lines = build._summary("tiny", settings, config, device, plan)
    assert lines["device"] == "a GPU, compute capability 8.6, 8.00 of 8.00 GiB free at start"
    assert lines["KV format"].startswith("fp32") and lines["dtype"] == "float32"
    assert lines["weights"].endswith("KiB in float32")
    assert lines["attention"].startswith("torch reference (not C++")
    assert "runs on the CPU, not on cuda" in lines["attention"]
    noted = Device(torch.device("cuda", 0), "old", GIB, GIB, "float16", "no bfloat16", 1)
    assert build._summary("tiny", settings, config, noted, plan)["dtype"] == "float16 (no bfloat16)"


def test_attention_is_named_for_each_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with a window, which are skipped, and of the others."""
    folder = tiny_models.build(tmp_path, tiny_models.VARIANTS["gemma3"])
    config = read_config(folder, trust_remote_code=False)
    layout, _ = build.plan_pool(Settings(kv_cache_dtype="int4", kv_cache_dtype_v="int8"), config, CPU)
    monkeypatch.setattr(build, "_kernel", lambda op, device, formats: f"{op} of {formats[0].value}")
    said = build.attention_in_words(layout, CPU)
    assert said == "int4/int8: paged_attention of int4; fp32: paged_attention of fp32"
    monkeypatch.setattr(build, "_kernel", lambda op, device, formats: "one for all")
    assert build.attention_in_words(layout, CPU) == "one for all"


def test_a_gpus_pool_leaves_room_for_a_step(tmp_path: Path) -> None:
    """0.9 of what is free holds weights, step and pool; the CPU's default is another."""
    config = read_config(tiny_models.build(tmp_path), trust_remote_code=False)
    settings = Settings(gpu_memory_utilization=None)
    _, plan = build.plan_pool(settings, config, device_of(GPU_OF_8_GIB))
    assert "by default 0.9 of the GPU" in plan.decided_by
    assert 5 * GIB < plan.pool_bytes < 0.9 * 8 * GIB - config.weight_bytes("float32") - 512 * 2**20
    _, on_cpu = build.plan_pool(settings, config, CPU)
    assert "--gpu-memory-utilization" not in on_cpu.decided_by


def test_a_gpu_that_cannot_hold_weights_and_a_step_is_a_sentence(tmp_path: Path) -> None:
    config = read_config(tiny_models.build(tmp_path), trust_remote_code=False)
    small = GPU("a small GPU", (8, 6), GIB, GIB // 4, has_bfloat16=True)
    with pytest.raises(StartupError, match=r"the weights and the .* of a step take .* --max-num-batched-tokens"):
        build.plan_pool(Settings(), config, device_of(small))


def test_refreshes_come_from_the_flag_and_are_told(tmp_path: Path) -> None:
    flags = {"kv_cache_dtype": "int8", "kv_refresh_interval": 8, "dtype": "float32", "max_model_len": 64}
    launch = Launch(str(tiny_models.build(tmp_path)), "tiny", Settings(**flags).model_dump(mode="json"), ())
    core, ready = build.build_core(launch, lambda loading: None)
    assert ready.summary["refresh"] == "every 8 generated tokens, 0.00 GiB for one sequence in full precision"
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    core.add(AddRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=params, arrival=0.0))
    while core.has_work:
        core.step()
    assert core.stats().refreshes_total == 2
    without = Launch(
        launch.path, "tiny", Settings(**{**flags, "kv_refresh_interval": None}).model_dump(mode="json"), ()
    )
    core, ready = build.build_core(without, lambda loading: None)
    assert "refresh" not in ready.summary and core.scheduler.limits.kv_refresh_interval is None


def test_refreshes_that_the_pool_is_too_small_for_are_refused(tmp_path: Path) -> None:
    config = read_config(tiny_models.build(tmp_path), trust_remote_code=False)
    given = {"kv_cache_dtype": "int8", "num_gpu_blocks_override": 2}
    words = r"--kv-refresh-interval 32 never comes, .* \(--num-gpu-blocks-override 2\) holds sequences of 32 tokens"
    with pytest.raises(StartupError, match=words):
        build.plan_pool(Settings(kv_refresh_interval=32, **given), config, CPU)
    assert build.plan_pool(Settings(kv_refresh_interval=31, **given), config, CPU)[1].max_model_len == 32


def test_what_a_model_computes_does_not_depend_on_how_much_memory_was_free(tmp_path: Path) -> None:
    """Pools that hold less than the window lower what is served, not the tables of positions nor what keys are fitted
    by."""
    path = str(tiny_models.build(tmp_path, tiny_models.TinyModel(head_dim=32)))
    found = []
    for blocks in (64, 5):
        flags = {"kv_cache_dtype": "int4", "dtype": "float32", "num_gpu_blocks_override": blocks, "device": "cpu"}
        settings = Settings(**flags).model_dump(mode="json")
        launch = Launch(path, "tiny", settings, (), fit_token_ids=list(range(250)))
        core, ready = build.build_core(launch, lambda loading: None)
        pages = core._executor.runner.attention.store.pages  # type: ignore[attr-defined]
        found.append((ready.cache.max_model_len, [each.k_transform for each in pages]))
    (long, whole), (short, limited) = found
    assert (long, short) == (512, 5 * 16)
    for one, other in zip(whole, limited, strict=True):
        assert torch.equal(one.channels, other.channels) and torch.equal(one.centre, other.centre)
