"""The doctor's facts, found on this machine."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tiny_models
import torch
from flash_library import on_a_gpu
from smollm2 import smollm2_gguf

from configs.kv import KVFormat
from configs.pool import Costs, weights_in_words
from configs.settings import Settings
from configs.version import VERSION
from engine import LLM, diagnosis
from engine.device import GPU, Device, NoGPU
from engine.diagnosis import Diagnosis, attention, diagnose, hub, kernels, machine, model, self_test, versions
from engine.errors import StartupError
from engine.kv_scales import KVScales
from engine.model.registry import read_config

CPU = Device.find(Settings(dtype="float32"), lambda: NoGPU("there is none", torch_could=False))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("looked-at") / "tiny")


def test_machine() -> None:
    facts = machine(CPU)
    assert facts["serves on"].startswith("CPU, ")
    assert f"{psutil.cpu_count()} logical" in facts["cores"] and facts["memory"].endswith(" to use")
    if not torch.cuda.is_available():
        assert facts["GPU"].startswith("none that torch sees (")


def test_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "CGROUP", tmp_path)
    assert "container memory" not in machine(CPU)
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    facts = machine(CPU)
    assert (facts["container memory"], facts["container processors"]) == ("1.00 GiB", "1.5")
    (tmp_path / "memory.max").write_text("max\n")
    assert "container memory" not in machine(CPU)


def test_versions() -> None:
    found = versions()
    assert found["octavo"] == VERSION and found["torch"] == torch.__version__ and found["compiler"]


def test_every_op_has_a_kernel_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    rows = kernels(Settings(), CPU, problems)
    assert {"paged_attention", "store_kv", "pack_linear", "rms_norm", "rotary"} <= rows.keys()
    assert rows["number format"] == "float32" and not problems
    bfloat16 = kernels(Settings(), replace(CPU, dtype_name="bfloat16"), problems)
    assert all(bfloat16[op] == rows[op] for op in ("softmax_weights", "draw_truncated")), "logits are fp32 all the same"
    if "C++ AMX" not in rows["pack_linear"]:
        assert "AMX" in rows["pack_linear"], "it says why not"
    monkeypatch.setattr(diagnosis.library, "load", lambda: None)
    monkeypatch.setattr(diagnosis.library, "refusal", lambda: "no C++ compiler; install g++")
    kernels(Settings(), CPU, problems)
    assert problems == ["There are no native kernels, so answers come slowly: no C++ compiler; install g++."]
    hopper = GPU("NVIDIA H200", (9, 0), 2**37, 2**37, has_bfloat16=True)
    rows = kernels(Settings(), Device.find(Settings(), lambda: hopper), problems)
    assert rows["number format"] == "bfloat16" and rows["softmax_weights"] == "torch reference"
    missed = {op: words for op, words in rows.items() if op != "library" and "C++" in words}
    assert not missed and len(problems) == 1, "on a GPU nobody misses the CPU's kernels"


def test_the_kernels_are_those_that_are_asked_for() -> None:
    rows = kernels(Settings(attention_backend="reference"), CPU, [])
    assert rows["paged_attention"].startswith("torch reference (not C++")
    assert rows["pack_linear"] == kernels(Settings(), CPU, [])["pack_linear"]
    rows = kernels(Settings(attention_backend="flash-attn"), CPU, [])
    assert rows["paged_attention"].startswith("none: ")
    gpu = Device.find(Settings(), lambda: GPU("NVIDIA H200", (9, 0), 2**37, 2**37, has_bfloat16=True))
    rows = {flag: kernels(Settings(batch_invariant=flag), gpu, [])["pack_linear"] for flag in (False, True)}
    assert "Triton" not in rows[False].split(" (not ")[0] and rows[True].startswith(("Triton", "none: "))


def test_the_kv_cache_that_would_be_chosen(tiny: Path) -> None:
    rows = model(Settings(model=str(tiny), num_gpu_blocks_override=64), CPU)
    assert rows["KV cache"].startswith("64 pages of 16 tokens = 1024 tokens")
    assert rows["decided by"] == "--num-gpu-blocks-override 64" and rows["longest sequence"] == "512 tokens"
    assert rows["KV format"] == "fp32; 512 bytes a token"
    rows = model(Settings(model=str(tiny), kv_cache_dtype="int8"), CPU)
    words = "int8 (a scale for each token and head); 144 bytes a token, 28.1 % of what fp32 takes"
    assert rows["KV format"] == words and rows["attention"]
    rows = model(Settings(model=str(tiny), num_gpu_blocks_override=4), CPU)
    assert "holds 64 tokens" in rows["note"]


def test_weights_are_said_with_their_form(tiny: Path) -> None:
    """As at start and by `octavo plan`."""
    for given, words in (
        ({}, "in float32"),
        ({"quantization": "int8"}, ": linear layers in int8, all else in float32"),
    ):
        settings = Settings(model=str(tiny), **given)
        costs = Costs.of(settings, read_config(tiny, False), "float32")
        said = model(settings, CPU)["weights"]
        assert said == weights_in_words(costs, "float32") and said.endswith(words)
    stored = model(Settings(model=str(smollm2_gguf())), CPU)["weights"]
    assert stored.endswith(": linear layers as the file has them, all else in float32")


def test_refresh_is_said_as_at_start(tmp_path: Path) -> None:
    """The scratch is as long as a sequence can get, which the pool limits here."""
    folder = tiny_models.build(tmp_path, tiny_models.TinyModel(max_position=65536))
    flags = {"model": str(folder), "kv_cache_dtype": "int8", "kv_refresh_interval": 32}
    launched = {**flags, "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 16, "num_threads": 1}
    with LLM(**launched) as llm:
        assert model(Settings(num_gpu_blocks_override=16, **flags), CPU)["refresh"] == llm.info.summary["refresh"]
    assert "0.03 GiB" in model(Settings(**flags, max_num_seqs=1), CPU)["refresh"]
    assert "refresh" not in model(Settings(model=str(folder), kv_cache_dtype="int8"), CPU)


def test_a_file_of_scales_that_would_not_be_served(tiny: Path, tmp_path: Path) -> None:
    flags = {"model": str(tiny), "kv_cache_dtype": "int8"}
    missing, scales = str(tmp_path / "missing"), tmp_path / "scales"
    for name in (str(tiny), "some/model"):
        with pytest.raises(StartupError, match=f"^--kv-cache-scales {missing} cannot be read: No such file"):
            model(Settings(**flags | {"model": name}, kv_cache_scales=missing), CPU)
    KVScales("Other", (KVFormat.INT8, KVFormat.INT8), "channel", 300, ()).save(scales)
    with pytest.raises(StartupError, match="is of another model"):
        model(Settings(**flags, kv_cache_scales=str(scales)), CPU)


def test_a_model_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert model(Settings(), CPU) == {"model": "the default model is not on this machine yet; octavo serve fetches it"}
    words = "some/model is not on this machine yet; octavo serve fetches it"
    assert model(Settings(model="some/model"), CPU) == {"model": words}
    with pytest.raises(StartupError, match="there is no such file"):
        model(Settings(model="/nowhere/x.gguf"), CPU)


@pytest.mark.parametrize("name", [None, "some/model"])
def test_a_backend_that_would_not_serve(name: str | None, tiny: Path) -> None:
    """Of a model that is here, and of one that is not."""
    flags = {"model": name or str(tiny), "attention_backend": "flash-attn"}
    with pytest.raises(StartupError, match=r"^--attention-backend flash-attn cannot serve here: "):
        model(Settings(**flags), CPU)


def test_verdicts_are_on_the_model_that_is_looked_at(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sinks, which flash-attn has not; of one that cannot be served another section says why."""
    sinks = tiny_models.build(tmp_path, tiny_models.FALLBACKS["gpt_oss"])
    unfit = {"model": str(tiny), "kv_cache_dtype_skip_layers": ("9",), "kv_cache_dtype": "int8"}
    h200 = Device.find(Settings(), lambda: GPU("NVIDIA H200", (9, 0), 2**37, 2**37, has_bfloat16=True))
    with on_a_gpu(monkeypatch) as library:
        library.install(monkeypatch, 3)
        for given, words in (
            ({"model": str(tiny)}, "flash-attn 3"),
            ({"model": str(sinks)}, "not here (flash-attn has no attention sinks (layer 0 of this model))"),
            ({"model": "/nowhere/x.gguf"}, "flash-attn 3"),
            (unfit, "not here (flash-attn 3: reads pages in bfloat16, not in int8; flash-attn 2: "),
        ):
            assert attention(Settings(**given), h200)["flash-attn"].startswith(words)


def test_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "not there yet" in hub()["cache"] and hub()["token"] == "there is one"
    assert "hf_secret" not in str(hub())


def test_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "SHAPES", ((96, 64), (64, 96)))
    problems: list[str] = []
    rows = self_test(CPU, problems)
    took = rows.pop("took")
    assert rows == {"linear 64 to 96, float32": "exact", "linear 96 to 64, float32": "exact"} and not problems
    assert "left out" not in took
    assert "2 shapes were left out" in self_test(CPU, problems, seconds=-1.0)["took"]


def test_the_self_test_tells_of_inexact_and_of_wrong_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "SHAPES", ((96, 64),))
    problems: list[str] = []
    with monkeypatch.context() as inexact:
        inexact.setattr(diagnosis, "probe", lambda packed, *where: "other bits for 1 of 40 rows computed alone")
        self_test(CPU, problems)
    [said] = problems
    assert "linear 64 to 96, float32: not exact: other bits for 1 of 40 rows computed alone" in said
    right = diagnosis.ops.linear
    monkeypatch.setattr(diagnosis.ops, "linear", lambda x, packed: right(x, packed) * 1.01)
    rows = self_test(CPU, problems)
    assert rows["linear 64 to 96, float32"].startswith("WRONG: off by 0.01") and len(problems) == 2


def test_a_device_that_cannot_be_had_is_a_problem_and_the_cpu_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(diagnosis, "SHAPES", ())
    found = diagnose(Settings(device="cuda", model="/nowhere/x.gguf", num_threads=1))
    assert found.problems[0].startswith("--device cuda is not possible here: ") and len(found.problems) == 2
    assert found.sections["machine"]["serves on"].startswith("CPU, 1 thread")


def test_what_is_wrong_hides_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "SHAPES", ((96, 64),))
    monkeypatch.setattr(diagnosis, "versions", lambda: 1 // 0)
    found = diagnose(Settings(model="/nowhere/x.gguf", num_threads=1))
    assert "--model: /nowhere/x.gguf: there is no such file" in found.problems[1]
    assert found.problems[0] == "versions: ZeroDivisionError: integer division or modulo by zero. Please report this."
    assert list(found.sections) == ["machine", "kernels", "attention", "Hugging Face Hub", "self-test"]
    assert isinstance(found, Diagnosis)
