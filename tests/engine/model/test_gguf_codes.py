"""Linear layers that keep the codes of a GGUF file: the bits of the file unpacked."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from engines import Engine, Loaded
from gguf import GGMLQuantizationType as Kind
from gguf_files import K_SCALES, random_blocks, write_gguf
from smollm2 import smollm2_gguf
from tiny_models import VARIANTS, TinyModel, build

from configs.gguf_forms import FORMS, common_form
from configs.model import WeightFormat
from configs.settings import Settings
from configs.supported import read_model
from engine.build import build_core
from engine.messages import Launch
from engine.model import gguf_codes
from engine.model.gguf_codes import read_codes
from engine.model.gguf_weights import GGUFSource
from engine.model.layers.linear import Linear
from engine.runner.solo import Solo
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.grouped_weight import CODES, GroupedWeight

IDS = list(range(3, 43))
DTYPES = (torch.float32, torch.bfloat16)


def mixed(name: str) -> Kind:
    """Fused layers of one type, of two that have a form together, and of two that have none."""
    kinds = {
        "blk.0.attn_q": Kind.Q4_K, "blk.0.attn_k": Kind.Q4_K, "blk.0.attn_v": Kind.Q6_K, "blk.0.ffn_gate": Kind.Q4_0,
        "blk.0.ffn_up": Kind.F16, "blk.0.ffn_down": Kind.Q6_K, "blk.1.attn_v": Kind.Q4_0, "blk.1.ffn_down": Kind.F32,
    }  # fmt: skip
    return kinds.get(name.removesuffix(".weight"), Kind.Q8_0 if name.startswith("token_embd") else Kind.Q4_1)


WIDE = TinyModel(hidden_size=256, intermediate_size=256, num_heads=4)
"""Rows of whole blocks of each type."""
FILES: dict[str, tuple[TinyModel, Kind | Callable[[str], Kind]]] = {
    "mixed": (replace(WIDE, tied=True), mixed),
    "K": (WIDE, lambda name: Kind.Q6_K if "attn_v" in name or "ffn_down" in name else Kind.Q4_K),
    "qwen2": (replace(VARIANTS["qwen2"], intermediate_size=128), Kind.Q5_0),
    "phi3": (replace(VARIANTS["phi3"], intermediate_size=128), Kind.Q4_0),
    "gemma3": (replace(VARIANTS["gemma3"], intermediate_size=128), Kind.Q5_1),
}


@pytest.fixture(scope="module", params=FILES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny, kind = FILES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return write_gguf(folder / "m.gguf", build(folder / "hf", replace(tiny, vocab_size=288)), kind)


def load(path: Path, dtype: torch.dtype, quantization: WeightFormat) -> Loaded:
    return Loaded.load(path, dtype, 256, quantization=quantization)


def logits(loaded: Loaded) -> torch.Tensor:
    solo = Solo(loaded.model, loaded.kv_layers, len(IDS), loaded.device)
    with torch.inference_mode():
        return loaded.model.logits(solo.hidden(IDS, chunk=16))


# ------------------------------------------------------------------ reading
@pytest.mark.parametrize("name", FORMS)
def test_codes_scales_and_minimums_make_the_numbers_of_the_gguf_package(name: str) -> None:
    kind = Kind[name]
    if kind in K_SCALES:
        raw = random_blocks((6, 512), kind)
    else:
        raw = gguf.quants.quantize(np.random.default_rng(0).standard_normal((6, 512), dtype=np.float32), kind)
    before = raw.copy()
    weight, form = read_codes(raw, int(kind)), FORMS[name]
    assert torch.equal(weight.widened(), torch.from_numpy(gguf.quants.dequantize(raw, kind)))
    assert np.array_equal(raw, before), "the file is not written to"
    assert weight.group == form.group and weight.scales.itemsize == form.scale_bytes
    assert (weight.minimums is not None) == form.has_minimums and form.lowest in CODES[form.bits]
    if form.bits == 4:
        assert {int(code) for code in weight.codes.unique()} == set(range(form.lowest, form.lowest + 16))


@pytest.mark.parametrize("name", FORMS)
def test_a_large_tensor_is_never_in_fp32_as_a_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are read some at a time, the last ones fewer."""
    kind, sizes = Kind[name], []
    raw = random_blocks((7, 512), kind) if kind in K_SCALES else None
    if raw is None:
        raw = gguf.quants.quantize(np.random.default_rng(0).standard_normal((7, 512), dtype=np.float32), kind)
    whole = read_codes(raw, int(kind))
    dequantize = gguf.quants.dequantize
    monkeypatch.setattr(gguf_codes, "NUMBERS", 1024)
    monkeypatch.setattr(gguf.quants, "dequantize", lambda data, of: (sizes.append(len(data)), dequantize(data, of))[1])
    parts = read_codes(raw, int(kind))
    assert sizes == [2, 2, 2, 1]
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scales, whole.scales)
    assert torch.equal(parts.widened(), whole.widened()) and parts.is_like(whole)


def test_a_weight_that_is_all_of_its_layer_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[object] = []
    pack = ops.pack_coded_linear
    monkeypatch.setattr(ops, "pack_coded_linear", lambda weight, *rest: (packed.append(weight), pack(weight, *rest))[1])
    weight = read_codes(random_blocks((4, 256), Kind.Q4_K), int(Kind.Q4_K))
    for form, is_copied in ((FORMS["Q4_K"], False), (FORMS["Q8_0"], True), (FORMS["Q6_K"], True)):
        layer = Linear(256, {"": 4}, bias=False, dtype=torch.float32)
        common = common_form((FORMS["Q4_K"], form))
        assert common is not None
        layer.keep_codes(common)
        layer.load_codes("", weight)
        assert (packed[-1] is not weight) is is_copied


def test_rows_of_queries_and_keys_are_put_in_order(file: Path) -> None:
    source = GGUFSource(file, read_model(file))
    names = [name for name in source.forms if "layers.0" in name]
    assert names
    for name in names:
        assert torch.equal(source.read_codes(name).widened(), source.read(name)), name


def test_a_weight_takes_any_that_its_form_is_common_to() -> None:
    """The numbers stay, to the bit, whatever is fused with what."""
    parts = {kind.name: read_codes(random_blocks((3, 256), kind), int(kind)) for kind in K_SCALES}
    plain = np.random.default_rng(1).standard_normal((3, 256), dtype=np.float32)
    for name in FORMS.keys() - parts.keys():
        parts[name] = read_codes(gguf.quants.quantize(plain, Kind[name]), int(Kind[name]))
    for first in FORMS:
        for second in FORMS:
            form = common_form((FORMS[first], FORMS[second]))
            assert form is not None
            layer = Linear(256, {"a": 3, "b": 3}, bias=False, dtype=torch.float32)
            layer.keep_codes(form)
            layer.load_codes("b", parts[second])
            assert isinstance(layer._codes, GroupedWeight)
            kept = layer._codes
            layer.load_codes("a", parts[first])
            assert layer._codes is None, "given up once it is packed"
            expected = torch.cat([parts[first].widened(), parts[second].widened()])
            assert torch.equal(kept.widened(), expected), (first, second)


# ------------------------------------------------------------------ whole models
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_the_file_unpacked(file: Path, dtype: torch.dtype) -> None:
    stored, plain = load(file, dtype, "stored"), load(file, dtype, "none")
    assert torch.equal(logits(stored), logits(plain))


def test_layers_keep_codes_where_all_that_they_fuse_has_a_form(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the configuration says, from the header alone."""
    kept: list[object] = []
    keep = Linear.keep_codes
    monkeypatch.setattr(Linear, "keep_codes", lambda self, form: (kept.append(form), keep(self, form)))
    load(file, torch.float32, "none")
    load(file, torch.float32, "int8")
    assert not kept
    load(file, torch.float32, "stored")
    forms = read_model(file).stored
    said = [form for layer in forms.layers for form in vars(layer).values()] + [forms.head]
    assert sorted(map(str, kept)) == sorted(str(form) for form in said if form)
    if file.parent.name.startswith("mixed"):
        assert said.count(None) == 2 and len({form for form in said if form}) == 5


def test_a_layer_takes_codes_or_numbers_as_it_was_told() -> None:
    weight = read_codes(random_blocks((3, 256), Kind.Q4_K), int(Kind.Q4_K))
    layer = Linear(256, {"": 3}, bias=False, dtype=torch.float32)
    with pytest.raises(AssertionError):
        layer.load_codes("", weight)
    layer.quantise()
    with pytest.raises(AssertionError):
        layer.load_codes("", weight)
    layer = Linear(256, {"": 3}, bias=False, dtype=torch.float32)
    layer.keep_codes(FORMS["Q4_K"])
    with pytest.raises(AssertionError):
        layer.load_part("", "weight", weight.widened())
    layer.load_codes("", weight)
    x = torch.randn(2, 256)
    assert torch.equal(ops.linear(x, layer.packed), ops.linear(x, ops.pack_linear(weight.widened())))


def test_it_is_the_default_and_start_up_says_so(file: Path) -> None:
    def start(**given: str) -> dict[str, str]:
        settings = Settings(model=str(file), dtype="float32", max_num_seqs=4, **given)
        launch = Launch(str(file), "tiny", settings.model_dump(mode="json"), ())
        core, ready = build_core(launch, lambda loading: None)
        core.shutdown()
        return ready.summary

    summary = start()
    assert "linear layers as the file has them, all else in float32" in summary["weights"]
    assert summary["answers"].startswith("not changed by other requests")
    assert start(quantization="none")["weights"].endswith("in float32")


def test_greedy_answers_of_smollm2_are_those_of_it_unpacked() -> None:
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not compute in bf16")
    prompts = [list(range(3, 30)), list(range(500, 600)), [11]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    stored, plain = (
        Engine(load(smollm2_gguf(), torch.bfloat16, quantization)).run(prompts, params)
        for quantization in ("stored", "none")
    )
    for found, expected in zip(stored, plain, strict=True):
        assert found.token_ids == expected.token_ids and torch.equal(found.chosen, expected.chosen)
