"""GGUF: files written here as llama.cpp's converter does, read back; SmolLM2 against transformers."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from contiguous_attention import ContiguousAttention, whole_sequences
from gguf import GGMLQuantizationType as Kind
from gguf_files import Extra, interleave, random_blocks, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from smollm2 import reference_model, smollm2_gguf
from tiny_models import LLAMA3, VARIANTS, TinyModel, build, longrope

from configs.model_gguf import GGUF_ARCHITECTURES
from configs.model_rope import RopeConfig
from configs.supported import read_model
from engine.errors import StartupError
from engine.model.base import CausalLM
from engine.model.gguf_weights import NAMES, OWN_NAMES, GGUFSource
from engine.model.registry import load_model

ONES = np.ones(8, dtype=np.float32)
SEQUENCE = [(11 * i) % 256 for i in range(40)]


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = read_model(path)
    return load_model(path, config, dtype, 64, lambda fraction: None)


@torch.inference_mode()
def logits_of(model: CausalLM) -> torch.Tensor:
    return model(whole_sequences([SEQUENCE]), ContiguousAttention(model.config))


def test_names_are_those_of_the_gguf_package() -> None:
    """Its own map from Hugging Face's names agrees, for every tensor of every family."""
    kinds = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "phi3": "PHI3", "gemma3": "GEMMA3"}
    assert list(GGUF_ARCHITECTURES) == list(kinds)
    for name, kind in kinds.items():
        architecture = getattr(gguf.MODEL_ARCH, kind)
        theirs = gguf.get_tensor_name_map(architecture, 1)
        ours = NAMES | OWN_NAMES.get(GGUF_ARCHITECTURES[name][0], {})
        known = {gguf.TENSOR_NAMES[tensor].replace("{bid}", "*") for tensor in gguf.MODEL_TENSORS[architecture]}
        for file in known & set(ours):
            if not (name == "phi3" and file.endswith(("attn_q", "attn_k", "attn_v"))):  # its files have them fused
                assert theirs.get_name(ours[file].replace("*", "0")) == file.replace("*", "0"), (name, file)
        rest = {file.rpartition(".")[2] for file in known - set(ours)}
        assert rest <= {"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd", "ffn_gate_inp",
                        "ffn_gate_exps", "ffn_down_exps", "ffn_up_exps"}, (name, rest)  # fmt: skip


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith("--model: ") and str(path) in message and message.endswith(".") and "\n" not in message
    return message


# ------------------------------------------------------------------ round trips
def with_longrope(frequencies: int, original: int, attention: float) -> Extra:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(attention)
        for name in ("long", "short"):
            values = np.array(longrope(frequencies)[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", values)

    return write


def linear_scaling(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


EXTRAS: dict[str, Extra] = {
    "phi3-short": with_longrope(8, 256, math.sqrt(1 + math.log(2) / math.log(256))),
    "phi3-long": with_longrope(6, 64, math.sqrt(1 + math.log(8) / math.log(64))),
    "gemma3-linear": linear_scaling,
}
SAME = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rotary_dim",
        "max_position", "intermediate_size", "rms_norm_eps", "local_rope", "layer_windows", "attention_scale",
        "qk_norm", "qkv_bias", "o_bias", "mlp_bias", "activation", "zero_centred_norms", "post_norms",
        "embedding_scale", "tie_word_embeddings", "num_parameters", "architecture")  # fmt: skip
ROUND_TRIPS = [
    "mha", "gqa", "mqa", "tied", "head-dim", "attention-bias", "mlp-bias", "rope-theta", "qwen2", "qwen3", "phi3",
    "phi3-short", "phi3-long", "gemma3", "gemma3-linear",
]  # fmt: skip


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_float32_file_equals_the_folder(name: str, tmp_path: Path) -> None:
    tiny = VARIANTS[name]
    if tiny.kind == "gemma3":  # the file says neither which layers have a window, every sixth has none, nor the scale
        extra = {"sliding_window": 24, "query_pre_attn_scalar": tiny.head_dim}
        tiny = dataclasses.replace(tiny, num_layers=7, extra=extra)
    folder = build(tmp_path / "hf", tiny)
    path = write_gguf(tmp_path / "model.gguf", folder, Kind.F32, extra=EXTRAS.get(name, lambda writer: None))
    ours, theirs = read_model(path), read_model(folder)
    for key in SAME:
        assert getattr(ours, key) == getattr(theirs, key), key
    for field in dataclasses.fields(RopeConfig):
        value = getattr(theirs.rope, field.name)
        assert getattr(ours.rope, field.name) == (value if isinstance(value, str) else pytest.approx(value)), field.name
    source, saved = GGUFSource(path, ours), load_file(folder / "model.safetensors")
    assert source.shapes == {key: tuple(tensor.shape) for key, tensor in saved.items()}
    for key, tensor in saved.items():
        is_shifted = tiny.kind == "gemma3" and key.endswith("norm.weight")
        assert torch.equal(source.read(key), (tensor + 1.0) - 1.0 if is_shifted else tensor), key
    torch.testing.assert_close(logits_of(load(path)), logits_of(load(folder)), rtol=1e-5, atol=1e-5)


def test_gemma_27b_scales_otherwise(tmp_path: Path) -> None:
    """The file does not say so: it is known by its layers."""
    tiny = dataclasses.replace(VARIANTS["gemma3"], num_layers=62, extra={"sliding_window": 24})
    path = write_gguf(tmp_path / "m.gguf", build(tmp_path / "hf", tiny), Kind.F32)
    assert read_model(path).attention_scale == (64 / 4) ** -0.5 != 32**-0.5


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3"])
def test_llama_alone_is_interleaved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse of the round trip: undoing what the converter did not do is seen."""
    path = write_gguf(tmp_path / "m.gguf", build(tmp_path / "hf", VARIANTS[name]), Kind.F32)
    expected, config = logits_of(load(path)), read_model(path)
    monkeypatch.setattr("engine.model.gguf_weights.INTERLEAVED", (config.architecture,))
    assert (logits_of(load(path)) - expected).abs().max() > 0.01


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_stored_types(kind: Kind, tmp_path: Path) -> None:
    """Each value is the nearest that the type can hold, so within half a step of the original."""
    folder = build(tmp_path / "hf")
    source = GGUFSource(path := write_gguf(tmp_path / "m.gguf", folder, kind), read_model(path))
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = source.read(name)
        assert values.dtype == torch.float32 and values.shape == tensor.shape
        if tensor.dim() == 1:
            assert torch.equal(values, tensor)
        elif kind in (Kind.F16, Kind.BF16):
            assert torch.equal(values, tensor.to(torch.float16 if kind == Kind.F16 else torch.bfloat16).float())
        else:
            spans = tensor.reshape(-1, 32).amax(-1) - tensor.reshape(-1, 32).amin(-1)
            steps = {Kind.Q8_0: 127, Kind.Q4_0: 7, Kind.Q4_1: 15, Kind.Q5_0: 15, Kind.Q5_1: 31}[kind]
            errors = (values - tensor).abs().reshape(-1, 32).amax(-1)
            assert (errors <= 1.01 * spans / steps + 1e-3).all() and errors.max() > 0
    drift = (logits_of(load(path)) - logits_of(load(folder))).abs().max()
    assert drift > 0


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants(kind: Kind, tmp_path: Path) -> None:
    """Blocks of 256: random codes with sane scales; what arrives is what the gguf package makes of the whole tensor."""
    folder = build(tmp_path / "hf", TinyModel(hidden_size=256, intermediate_size=256, num_heads=4, num_layers=1))
    raw = random_blocks((256, 256), kind)
    name = "model.layers.0.self_attn.q_proj.weight"
    path = write_gguf(
        tmp_path / "m.gguf",
        folder,
        Kind.F16,
        drop=name,
        extra=lambda writer: writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=kind),
    )
    expected = gguf.quants.dequantize(raw, kind)
    assert np.isfinite(expected).all() and expected.std() > 0
    source = GGUFSource(path, read_model(path))
    assert np.array_equal(interleave(source.read(name).numpy(), 4), expected)
    assert torch.isfinite(logits_of(load(path))).all()


def test_llama3_scaling_travels_as_divisors(tmp_path: Path) -> None:
    """The converter writes one divisor a frequency; the logits are those of the config.json form."""
    folder = build(tmp_path / "hf", VARIANTS["rope-llama3"])
    theta, head_dim = 10000.0, 16
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        keep = (LLAMA3["original_max_position_embeddings"] / wavelength - 1.0) / (4.0 - 1.0)
        keep = min(max(keep, 0.0), 1.0)
        factors.append(1.0 / ((1.0 - keep) / LLAMA3["factor"] + keep))
    path = write_gguf(
        tmp_path / "m.gguf",
        folder,
        Kind.F32,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32)),
    )
    rope = read_model(path).rope
    assert rope.kind == "divisors" and rope.divisors == pytest.approx(factors)
    torch.testing.assert_close(logits_of(load(path)), logits_of(load(folder)), rtol=1e-4, atol=1e-4)
    plain = write_gguf(tmp_path / "plain.gguf", folder, Kind.F32)
    assert (logits_of(load(plain)) - logits_of(load(folder))).abs().max() > 0.01


def test_rope_scaling_keys(tmp_path: Path) -> None:
    folder = build(tmp_path / "hf")

    def rope_of(**values: Any) -> RopeConfig:
        def write(writer: gguf.GGUFWriter) -> None:
            for key, value in values.items():
                getattr(writer, f"add_rope_scaling_{key}")(value)

        return read_model(write_gguf(tmp_path / "m.gguf", folder, Kind.F32, extra=write)).rope

    assert rope_of(type=gguf.RopeScalingType.LINEAR, factor=2.5) == RopeConfig("linear", 10000.0, 2.5)
    yarn = rope_of(type=gguf.RopeScalingType.YARN, factor=4.0, orig_ctx_len=128)
    assert (yarn.kind, yarn.factor, yarn.original_max_position) == ("yarn", 4.0, 128)
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    tuned = rope_of(type=gguf.RopeScalingType.YARN, factor=4.0, orig_ctx_len=128, attn_factors=0.5, yarn_beta_fast=16.0)
    assert tuned.attention_factor == pytest.approx(0.5 * yarn.attention_factor) and tuned.beta_fast == 16.0
    with pytest.raises(StartupError, match=r"llama\.rope\.scaling\.type must be one of default, linear, .*'divisors'"):
        rope_of(type=SimpleNamespace(value="divisors"))
    with pytest.raises(StartupError, match="rope_parameters: short_factor is missing; it must be 8 positive numbers"):
        rope_of(type=gguf.RopeScalingType.LONGROPE)
    with pytest.raises(StartupError, match=r"rope_factors_short\.weight is missing, cut short or not stored as 32-bit"):
        write_gguf(
            tmp_path / "m.gguf", folder, Kind.F32, extra=lambda w: w.add_tensor("rope_factors_long.weight", ONES)
        )
        read_model(tmp_path / "m.gguf")


def test_sampling_defaults(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 20)

    path = write_gguf(tmp_path / "m.gguf", build(tmp_path / "hf"), Kind.F32, extra=extra)
    generation = read_model(path).generation
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.7, 20, None)


# ------------------------------------------------------------------ refusals
def test_missing_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", build(tmp_path / "hf"), Kind.F32, drop="model.layers.1.mlp.up_proj.weight")
    assert "lacks model.layers.1.mlp.up_proj.weight" in refusal(path)


def test_unknown_tensor(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(16, dtype=np.float32))

    path = write_gguf(tmp_path / "m.gguf", build(tmp_path / "hf"), Kind.F32, extra=extra)
    assert "holds blk.0.attn_q_norm.weight, which this architecture does not have" in refusal(path)


def test_type_that_is_not_read(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), dtype=np.int8))

    drop = "model.layers.0.self_attn.q_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", build(tmp_path / "hf"), Kind.F32, drop=drop, extra=extra)
    assert "blk.0.attn_q.weight is stored as I8; read are F32, F16, BF16, Q4_0" in refusal(path)


def test_file_cut_short(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", build(tmp_path / "hf"), Kind.F32)
    path.write_bytes(path.read_bytes()[:-100])
    assert "is incomplete: it ends at byte" in refusal(path)


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [
        ("gemma2", lambda writer: None, "(GGUF architecture 'gemma2'): this architecture is not supported as GGUF"),
        ("llama", lambda writer: writer.add_expert_count(8), "mixtures of experts are not supported"),
        ("llama", lambda writer: writer.add_uint16("split.count", 3), "the GGUF is split into several files"),
        ("llama", lambda writer: None, "llama.embedding_length is missing"),
    ],
)
def test_header_that_is_refused(name: str, extra: Extra, words: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, name)
    extra(writer)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StartupError) as caught:
        read_model(path)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file with every kind of key that the configuration reads."""
    folder = tmp_path_factory.mktemp("header")

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_attn_factors(0.5)
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))

    return write_gguf(folder / "m.gguf", build(folder / "hf"), Kind.Q4_0, extra=extra).read_bytes()


@settings(deadline=None, max_examples=60)
@given(places=st.lists(st.tuples(st.integers(4, 2500), st.integers(0, 255)), min_size=1, max_size=3))
def test_damaged_header_is_read_or_refused(
    places: list[tuple[int, int]], header: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(header)
    for position, value in places:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    try:
        GGUFSource(path, read_model(path))
    except StartupError as error:
        assert "--model" in str(error)


# ------------------------------------------------------------------ the real model
@pytest.fixture(scope="module")
def smollm2() -> Path:
    return smollm2_gguf()


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own reading of the file, dequantised to fp32."""
    return reference_model()


def test_smollm2_shapes(smollm2: Path) -> None:
    config = read_model(smollm2)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.window, config.tie_word_embeddings) == (49152, 8192, True)
    assert config.rms_norm_eps == 1e-5
    assert config.num_parameters == 134_515_008


def test_smollm2_weights_equal_transformers_bit_for_bit(smollm2: Path, reference: Any) -> None:
    theirs: Mapping[str, torch.Tensor] = reference.state_dict()
    source = GGUFSource(smollm2, read_model(smollm2))
    assert set(source.shapes) | {"lm_head.weight"} == set(theirs)
    for name in source.shapes:
        assert torch.equal(source.read(name), theirs[name]), name


@torch.inference_mode()
def test_smollm2_logits_equal_transformers(smollm2: Path, reference: Any) -> None:
    ids = [(37 * i * i + 11 * i + 5) % 49152 for i in range(64)]
    model = load(smollm2)
    ours = model(whole_sequences([ids]), ContiguousAttention(model.config))
    theirs = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
