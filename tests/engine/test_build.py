"""What the joining of parts says and reckons: exactness, and pools on the CPU and on a GPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import static_kernels
import tiny_models
import torch
from engines import Engine, Loaded, Unsteady
from late_device import LateDevice

from configs.kv import KVLayout
from configs.settings import Settings
from engine import build
from engine.attention_backends import described
from engine.device import GPU, Device, NoGPU
from engine.errors import StartupError
from engine.messages import AddRequest, Launch
from engine.model.registry import read_config
from engine.runner.ahead import AheadExecutor
from engine.runner.executor import ModelExecutor, SingleExecutor
from engine.sampling_params import SamplingParams
from kernels import reference
from kernels.registry import choose

GIB = 2**30
GPU_OF_8_GIB = GPU("a GPU", (8, 6), 8 * GIB, 8 * GIB, has_bfloat16=True)


def device_of(found: GPU | NoGPU, **given: object) -> Device:
    return Device.find(Settings(dtype="float32", **given), lambda: found)


CPU = device_of(NoGPU("", False))
FLAG = Settings(batch_invariant=True, dtype="float32", device="cpu", num_gpu_blocks_override=64).model_dump(mode="json")


@pytest.fixture
def executor(tmp_path: Path) -> ModelExecutor:
    return Engine(Loaded.load(tiny_models.build(tmp_path), torch.float32, 128)).executor


def test_a_model_that_company_changes_is_warned_of(executor: ModelExecutor, caplog) -> None:
    executor.runner.model = Unsteady(executor.runner.model)
    said = build._exactness(executor, Settings(), CPU)
    assert "may be changed a little by other requests" in said and "(the model: other bits in steps of" in said
    assert said in caplog.text


def test_a_machine_whose_linears_are_not_exact_is_warned_of(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    for settings in (Settings(), Settings(batch_invariant=True)):
        said = build._exactness(executor, settings, CPU)
        assert said.startswith("not changed by other requests") and not caplog.text
    monkeypatch.setattr(build, "inexact", lambda layers, *where: {"model.layers.0.o": "other bits with one thread"})
    said = build._exactness(executor, Settings(), CPU)
    assert said.startswith("may be changed a little") and "model.layers.0.o: other bits with one thread" in said
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.name == "octavo.engine" and said in record.getMessage()


def test_a_gpu_is_said_to_be_exact_only_where_that_was_asked_for_and_looked_at(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    gpu, asked = device_of(GPU_OF_8_GIB), []

    def inexact(layers, dtype, place):
        asked.append((len(layers), dtype, place))
        return {}

    monkeypatch.setattr(build, "inexact", inexact)
    said = build._exactness(executor, Settings(), gpu)
    assert said.startswith("may be changed a little by other requests, since") and "(--batch-invariant prev" in said
    assert not asked, "nothing is multiplied to find out"
    said = build._exactness(executor, Settings(batch_invariant=True), gpu)
    assert said == "not changed by other requests in the least, bit for bit (checked on this machine)"
    assert asked == [(9, torch.float32, gpu.place)] and not caplog.text
    executor.runner.model = Unsteady(executor.runner.model)
    said = build._exactness(executor, Settings(batch_invariant=True), gpu)
    assert said.startswith("may be changed a little by other requests, since") and "(the model: other bits" in said
    assert said in caplog.text


def test_on_a_cpu_the_flag_changes_nothing(tmp_path: Path) -> None:
    """Linear layers are the usual ones."""
    launch = Launch(str(tiny_models.build(tmp_path)), "tiny", FLAG, ())
    core, ready = build.build_core(launch, lambda loading: None)
    core.shutdown()
    assert ready.summary["linear"] == described(choose("pack_linear", "cpu", torch.float32))
    assert ready.summary["answers"].startswith("not changed by other requests in the least")


def test_the_start_up_block_names_the_device_and_its_kernels(tmp_path: Path) -> None:
    config = read_config(tiny_models.build(tmp_path), trust_remote_code=False)
    device = device_of(GPU_OF_8_GIB)
    settings = Settings(num_gpu_blocks_override=64)
    _, plan = build.plan_pool(settings, config, device)
    lines = build._summary("tiny", settings, config, device, plan)
    assert lines["device"] == "a GPU, compute capability 8.6, 8.00 of 8.00 GiB free at start"
    assert lines["KV format"].startswith("fp32") and lines["dtype"] == "float32"
    assert lines["weights"].endswith("KiB in float32")
    for name in ("attention", "linear"):
        assert lines[name].startswith("torch reference (not ") and "C++" not in lines[name] and "CPU" not in lines[name]
    noted = Device(torch.device("cuda", 0), "old", GIB, GIB, "float16", "no bfloat16", 1)
    assert build._summary("tiny", settings, config, noted, plan)["dtype"] == "float16 (no bfloat16)"


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


def test_a_gpus_host_runs_ahead_and_its_decode_steps_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU that is said to be a GPU, behind a link that is late."""
    loaded = Loaded.load(tiny_models.build(tmp_path), torch.float32, 128)
    layout = KVLayout.of(loaded.kv_layers, 16)
    monkeypatch.setattr(build, "CudaLink", lambda place: LateDevice())
    said_to_be_one = SimpleNamespace(place=torch.device("cpu"), is_gpu=True, dtype=torch.float32)

    def start(**given: object) -> tuple[object, str]:
        settings = Settings(max_num_seqs=12, **given)
        runner = Engine(loaded, max_num_seqs=12).executor.runner
        executor, said = build._start(settings, runner, layout, said_to_be_one, ())
        return executor, said["CUDA graphs"]

    with static_kernels.served():
        executor, said = start()
        assert isinstance(executor, AheadExecutor) and said.startswith("5 sizes up to 12 sequences, captured in ")
        executor, said = start(enforce_eager=True)
        assert isinstance(executor, AheadExecutor) and said == "none (--enforce-eager)"
        waits = SimpleNamespace(name=reference.NAME)
        monkeypatch.setattr(build, "choose", lambda op, *where: waits)
        assert start()[1] == "none (torch reference serves store_kv, which waits for the GPU)"
        loaded = replace(loaded, model=Unsteady(loaded.model))
        assert start()[1] == "none (transformers' code computes, which may wait for the GPU)"


def test_a_cpu_has_neither(executor: ModelExecutor) -> None:
    started, said = build._start(Settings(), executor.runner, KVLayout.of((), 16), CPU, ())
    assert isinstance(started, SingleExecutor) and said == {}
