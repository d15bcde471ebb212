"""--attention-backend: who may serve where, and what people are told."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from engines import Engine, Loaded
from flash_library import FlashLibrary, on_a_gpu

from configs.kv import KVFormat, KVLayout, KVOrder, LayerKV
from configs.settings import Settings
from engine import SamplingParams, attention_backends, build
from engine.attention_backends import (
    BACKENDS,
    attention_in_words,
    backend_verdicts,
    check_backend,
    cost_of_pages,
    described,
    grouped,
)
from engine.device import GPU, Device, NoGPU
from engine.errors import StartupError
from engine.messages import Launch
from engine.model.registry import read_config
from kernels import flash, reference
from kernels.registry import Choice, candidates

CPU = Device.find(Settings(dtype="float32"), lambda: NoGPU("there is none", torch_could=False))
HOPPER = GPU("NVIDIA H200", (9, 0), 2**37, 2**37, has_bfloat16=True)
H200 = Device.find(Settings(), lambda: HOPPER)
SPARE = {"max_model_len": 64, "num_gpu_blocks_override": 64, "dtype": "float32", "device": "cpu"}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashLibrary]:
    with on_a_gpu(monkeypatch) as library:
        yield library


def layout(block_size: int = 16, *formats: KVFormat) -> KVLayout:
    layers = tuple(LayerKV(2, 64, format) for format in formats or (KVFormat.BF16,))
    return KVLayout.of(layers, block_size, order=KVOrder.ROWS)


def refusal(device: Device, config=None, **given: object) -> str:
    with pytest.raises(StartupError) as caught:
        check_backend(Settings(**given), device, config)
    return str(caught.value)


def test_flags_name_the_backends_that_there_are() -> None:
    found = {candidate.backend for candidate in candidates("paged_attention")}
    assert None not in found and found <= set(BACKENDS)


def test_the_machines_own_backends_serve() -> None:
    for name in ("auto", "reference"):
        check_backend(Settings(attention_backend=name), CPU)
        check_backend(Settings(attention_backend=name), H200)
    check_backend(Settings(attention_backend="cpu"), CPU)


def test_a_cpus_kernels_on_a_gpu_and_a_gpus_on_a_cpu(library: FlashLibrary) -> None:
    said = refusal(H200, attention_backend="cpu")
    assert said.startswith("--attention-backend cpu cannot serve here: C++ AMX bf16, C++ AVX-512 bf16, ")
    assert ": runs on the CPU, not on cuda. Leave it at auto, and " in said and said.endswith(" serves.")
    assert "--attention-backend" not in said[1:], "other backends are not what is wrong"
    said = refusal(CPU, attention_backend="flash-attn")
    words = "--attention-backend flash-attn cannot serve here: flash-attn 3, flash-attn 2: runs on a GPU, not on"
    assert said.startswith(f"{words} cpu. Leave it at auto, and ")


def test_what_is_not_installed(library: FlashLibrary) -> None:
    said = refusal(H200, attention_backend="flash-attn")
    assert "flash-attn 3: flash_attn_interface is not installed (docs/gpu.md" in said
    assert "; flash-attn 2: flash_attn is not installed (docs/gpu.md" in said


def test_a_model_that_flash_attn_cannot_serve(tmp_path: Path, monkeypatch, library: FlashLibrary) -> None:
    library.install(monkeypatch, 2)
    named = {"attention_backend": "flash-attn"}
    llama = read_config(tiny_models.build(tmp_path / "llama"), trust_remote_code=False)
    check_backend(Settings(**named), H200, llama)
    said = refusal(H200, llama, **named, kv_cache_dtype="int8")
    assert "flash-attn 2: reads pages in bfloat16, not in int8." in said
    said = refusal(H200, llama, **named, kv_cache_dtype_v="fp8")
    assert "flash-attn 2: reads pages in bfloat16, not in fp8_e4m3." in said
    odd = read_config(tiny_models.build(tmp_path / "odd", tiny_models.TinyModel(head_dim=12)), trust_remote_code=False)
    said = refusal(H200, odd, **named)
    assert "flash-attn takes heads of a multiple of 8 dims up to 256, not of 12 (layer 0 of this model). Leave" in said


def test_the_caches_format_is_looked_at_where_no_model_is_known(monkeypatch, library: FlashLibrary) -> None:
    library.install(monkeypatch, 2)
    said = refusal(H200, attention_backend="flash-attn", kv_cache_dtype="int8")
    assert "flash-attn 2: reads pages in bfloat16, not in int8." in said


def test_sinks_are_known_before_weights_are_read(tmp_path: Path, monkeypatch, library: FlashLibrary) -> None:
    library.install(monkeypatch, 3)
    for name, words in (("gpt_oss", "flash-attn has no attention sinks (layer 0 of this model)"), ("gemma2", None)):
        folder = tiny_models.build(tmp_path / name, tiny_models.FALLBACKS[name])
        config = read_config(folder, trust_remote_code=False)
        assert config.has_sinks is (words is not None)
        if words is None:
            check_backend(Settings(attention_backend="flash-attn"), H200, config)
        else:
            assert words in refusal(H200, config, attention_backend="flash-attn")


# ------------------------------------------------------------------ in words
def test_reasons_are_said_once() -> None:
    refused = (("a", "too old"), ("b", "too new"), ("c", "too old"))
    assert grouped(refused) == "a, c: too old; b: too new"
    choice = Choice("op", "cpu", torch.float32, "this", len, (*refused, ("d", "this is preferred")), refused[:1])
    assert described(choice) == "this (not a: too old)", "what comes after it in any case is no news"


def test_the_start_up_block_says_who_computes_what(monkeypatch, library: FlashLibrary) -> None:
    library.install(monkeypatch, 2)
    said = attention_in_words(layout(16), H200, "flash-attn")
    assert said.startswith("flash-attn 2 (not flash-attn 3: flash_attn_interface is not installed")
    assert "C++" not in said, "nobody misses the CPU's kernels"
    others = attention_backends._choice(H200, (KVFormat.BF16,) * 2, "auto").name
    assert said.endswith(
        f"; it computes prompts of which nothing is cached, and {others} all else, since it reads pages of a multiple "
        "of 256 tokens only (--block-size 256)"
    )
    assert "prompts" not in attention_in_words(layout(256), H200, "flash-attn")
    auto = attention_in_words(layout(16), H200, "auto")
    assert "flash-attn 3, flash-attn 2: on request only (--attention-backend flash-attn)" in auto and "C++" not in auto
    assert "flash" not in attention_in_words(layout(16, KVFormat.FP32), CPU, "cpu")


def test_each_format_is_named_where_they_are_served_differently(monkeypatch) -> None:
    monkeypatch.setattr(attention_backends, "described", lambda choice: f"{choice.name}")
    mixed = layout(16, KVFormat.INT4, KVFormat.FP32)
    served = {KVFormat.INT4: "one", KVFormat.FP32: "another"}

    def choose(device: Device, formats: tuple[KVFormat, KVFormat], backend: str) -> Choice:
        return Choice("op", "cpu", torch.float32, served[formats[0]], len, (), 0)

    monkeypatch.setattr(attention_backends, "_choice", choose)
    assert attention_in_words(mixed, CPU, "auto") == "int4: one; fp32: another"
    served[KVFormat.FP32] = "one"
    assert attention_in_words(mixed, CPU, "auto") == "one"


def test_what_large_pages_cost_is_said() -> None:
    """2 layers of 2 heads of 64 dims, K and V in bf16: 1,024 bytes a token."""
    said = cost_of_pages(layout(256, KVFormat.BF16, KVFormat.BF16))
    assert said == (
        "256 tokens: in the last page of a sequence 128 of them stay empty on average, 128 KiB (with pages of 16 "
        "tokens 8 KiB); requests that begin alike share whole pages, and "
        "copy up to 255 tokens that they have in common beyond"
    )


def test_the_cost_stands_in_the_start_up_block_where_it_was_asked_for(tmp_path, monkeypatch, library) -> None:
    library.install(monkeypatch, 2)
    config = read_config(tiny_models.build(tmp_path), trust_remote_code=False)
    for given, is_told in (
        ({"attention_backend": "flash-attn", "block_size": 256}, True),
        ({"attention_backend": "flash-attn"}, False),
        ({"block_size": 256}, False),
    ):
        settings = Settings(**given, num_gpu_blocks_override=64)
        _, plan = build.plan_pool(settings, config, H200)
        lines = build._summary("tiny", settings, config, H200, plan)
        assert ("pages" in lines) is is_told
        assert lines["attention"].startswith("flash-attn 2") is ("attention_backend" in given)


def test_the_doctor_lists_each_backend_with_its_verdict(monkeypatch, library: FlashLibrary) -> None:
    found = backend_verdicts(Settings(), CPU)
    assert list(found) == ["auto", *BACKENDS]
    assert found["cpu"] == found["auto"] and found["reference"] == reference.NAME
    assert found["flash-attn"] == "not here (flash-attn 3, flash-attn 2: runs on a GPU, not on cpu)"
    found = backend_verdicts(Settings(), H200)
    assert found["cpu"].startswith("not here (C++ AMX bf16") and "flash_attn is not installed" in found["flash-attn"]
    library.install(monkeypatch, 2, 3)
    flash.choose.cache_clear()
    assert backend_verdicts(Settings(), H200)["flash-attn"] == "flash-attn 3"


def test_verdicts_know_the_caches_format_and_the_model(tmp_path: Path, monkeypatch, library: FlashLibrary) -> None:
    """Whatever backend is named."""
    library.install(monkeypatch, 2, 3)
    words = "not here (flash-attn 3, flash-attn 2: reads pages in bfloat16, not in int8)"
    llama = read_config(tiny_models.build(tmp_path / "llama"), trust_remote_code=False)
    for config in (None, llama):
        settings = Settings(kv_cache_dtype_v="int8", attention_backend="reference")
        found = backend_verdicts(settings, H200, config)
        assert (found["flash-attn"], found["reference"]) == (words, reference.NAME)
        assert backend_verdicts(Settings(), H200, config)["flash-attn"] == "flash-attn 3"
    odd = read_config(tiny_models.build(tmp_path / "odd", tiny_models.TinyModel(head_dim=12)), trust_remote_code=False)
    found = backend_verdicts(Settings(), H200, odd)
    assert found["flash-attn"].startswith("not here (flash-attn takes heads of a multiple of 8 dims up to 256, not of")
    others = backend_verdicts(Settings(), H200)
    assert all(found[name] == others[name] for name in found.keys() - {"flash-attn"})


def test_verdicts_name_everybody_who_would_serve(tmp_path: Path, monkeypatch) -> None:
    """A model whose windowed layers are not quantised."""
    config = read_config(tiny_models.build(tmp_path, tiny_models.VARIANTS["gemma3"]), trust_remote_code=False)
    served = {KVFormat.INT8: "one", KVFormat.FP32: "another"}

    def choose(device: Device, formats: tuple[KVFormat, KVFormat], backend: str) -> Choice:
        return Choice("op", "cpu", torch.float32, served[formats[0]], len, (), ())

    monkeypatch.setattr(attention_backends, "_choice", choose)
    found = backend_verdicts(Settings(kv_cache_dtype="int8"), CPU, config)
    assert set(found["auto"].split(", ")) == {"one", "another"}


# ------------------------------------------------------------------ in an engine
def test_a_backend_that_cannot_serve_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(build, "load_model", lambda *given: pytest.fail("weights are read"))
    settings = Settings(attention_backend="flash-attn", **SPARE).model_dump(mode="json")
    with pytest.raises(StartupError, match="--attention-backend flash-attn cannot serve here"):
        build.build_core(Launch(str(tiny_models.build(tmp_path)), "tiny", settings, ()), lambda loading: None)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_named_backend_computes(name: str, tmp_path: Path, monkeypatch) -> None:
    """Of an engine built with the flag: whose functions are called."""
    asked = set()
    real = attention_backends.choose

    def choose(op, device, dtype, formats=None, backend="auto"):
        if op == "paged_attention":
            asked.add(backend)
        return real(op, device, dtype, formats, backend)

    monkeypatch.setattr("kernels.ops.choose", choose)
    settings = Settings(attention_backend=name, **SPARE).model_dump(mode="json")
    _, ready = build.build_core(Launch(str(tiny_models.build(tmp_path)), "tiny", settings, ()), lambda loading: None)
    assert asked == {name}
    assert ready.summary["attention"].startswith("torch reference" if name == "reference" else "C++")


def test_backends_give_the_same_answers(tmp_path: Path) -> None:
    loaded = Loaded.load(tiny_models.build(tmp_path), torch.float32, 128)
    prompts = [[(7 * i * i + 3 * i + 1) % 256 for i in range(length)] for length in (40, 1, 17)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = []
    for name in ("auto", "reference"):
        engine = Engine(loaded)
        engine.executor.runner.attention.backend = name
        found.append([each.token_ids for each in engine.run(prompts, greedy)])
    assert found[0] == found[1]
