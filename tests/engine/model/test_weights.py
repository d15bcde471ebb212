"""Loading safetensors: every tensor in its place, and one clear sentence for each way a checkpoint can be wrong."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from contiguous_attention import ContiguousAttention, whole_sequences
from safetensors.torch import load_file, save_file
from tiny_models import VARIANTS, TinyModel, build, load_reference

from configs.supported import read_model
from engine.errors import StartupError
from engine.model.base import CausalLM
from engine.model.registry import load_model
from engine.model.weights import INDEX, SafetensorsSource

SEQUENCE = [(11 * i) % 256 for i in range(40)]
Q = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(folder, read_model(folder), dtype, 64, lambda fraction: None)


@torch.inference_mode()
def logits_of(model: CausalLM) -> torch.Tensor:
    return model(whole_sequences([SEQUENCE]), ContiguousAttention(model.config))


def refusal(folder: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load(folder)
    message = str(caught.value)
    assert message.startswith("--model: ") and str(folder) in message and message.endswith(".") and "\n" not in message
    return message


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# ------------------------------------------------------------------ what loads
def test_sharded_checkpoint_equals_the_single_file(tmp_path: Path) -> None:
    single, sharded = build(tmp_path / "a"), build(tmp_path / "b", TinyModel(max_shard_size="60KB"))
    assert len(list(sharded.glob("*.safetensors"))) > 2 and (sharded / INDEX).exists()
    assert torch.equal(logits_of(load(single)), logits_of(load(sharded)))


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = build(tmp_path, TinyModel(max_shard_size="60KB"))
    expected = logits_of(load(folder))
    (folder / INDEX).unlink()
    assert torch.equal(logits_of(load(folder)), expected)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_stored_dtype_is_converted(stored: str, tmp_path: Path) -> None:
    folder = build(tmp_path, TinyModel(dtype=stored))
    with torch.inference_mode():
        theirs = load_reference(folder)(torch.tensor([SEQUENCE])).logits[0]
    torch.testing.assert_close(logits_of(load(folder)), theirs, rtol=1e-4, atol=1e-4)


def test_progress_rises_to_one(tmp_path: Path) -> None:
    folder = build(tmp_path)
    seen: list[float] = []
    load_model(folder, read_model(folder), torch.float32, 64, seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0 and 0.0 < seen[0] < 1.0
    assert len(seen) == len(load_file(folder / "model.safetensors"))


def test_rotary_tables_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    folder = build(tmp_path)
    expected = logits_of(load(folder))
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits_of(load(folder)), expected)


def test_tied_checkpoint_that_carries_a_head(tmp_path: Path) -> None:
    """Equal to the embedding it changes nothing; different, it is used, as transformers does."""
    folder = build(tmp_path, VARIANTS["tied"])
    expected = logits_of(load(folder))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(logits_of(load(folder)), expected)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.flip(0)}))
    torch.testing.assert_close(logits_of(load(folder)), expected.flip(-1), rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        theirs = load_reference(folder)(torch.tensor([SEQUENCE])).logits[0]
    torch.testing.assert_close(logits_of(load(folder)), theirs, rtol=1e-4, atol=1e-4)


def test_checkpoint_can_go_once_it_is_loaded(tmp_path: Path) -> None:
    """No module keeps a view of the mapped file."""
    folder = build(tmp_path)
    model = load(folder)
    expected = logits_of(model)
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(logits_of(model), expected)


def test_tensors_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more of them alive than the one that is being placed."""
    import gc
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    plain = SafetensorsSource.read

    def read(self: SafetensorsSource, name: str) -> torch.Tensor:
        assert not [ref for ref in alive if ref() is not None]
        tensor = plain(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", read)
    gc.collect()
    load(build(tmp_path))
    assert len(alive) > 10


# ------------------------------------------------------------------ what is refused
def test_missing_weights(tmp_path: Path) -> None:
    folder = build(tmp_path)
    edit(folder, lambda tensors: tensors.pop(Q))
    assert f"lacks {Q}: it is incomplete" in refusal(folder)
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name])
    assert "and 7 more weights" in refusal(folder)


def test_missing_head_of_an_untied_model(tmp_path: Path) -> None:
    folder = build(tmp_path)
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lacks lm_head.weight" in refusal(folder)


def test_unexpected_weights(tmp_path: Path) -> None:
    folder = build(tmp_path)
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    assert "holds model.layers.0.self_attn.q_norm.weight, which this architecture does not have" in refusal(folder)


def test_bias_that_the_configuration_does_not_know(tmp_path: Path) -> None:
    folder = build(tmp_path, VARIANTS["attention-bias"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": False}))
    assert "holds model.layers.0.self_attn.k_proj.bias" in refusal(folder)


def test_wrong_shape(tmp_path: Path) -> None:
    folder = build(tmp_path)
    edit(folder, lambda tensors: tensors.update({Q: torch.ones(32, 64)}))
    assert f"{Q} has shape [32, 64], the configuration asks for [64, 64]" in refusal(folder)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")]
)
def test_weights_of_other_numbers(
    dtype: torch.dtype, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path, VARIANTS["attention-bias"])
    monkeypatch.setattr(SafetensorsSource, "read", lambda self, name: pytest.fail(f"{name} was read"))
    for name in (Q, "model.layers.1.self_attn.o_proj.bias"):
        whole = load_file(folder / "model.safetensors")
        edit(folder, lambda tensors, name=name: tensors.update({name: tensors[name].to(dtype)}))
        assert f"{name} is stored as {kind}; bf16, fp16 and fp32 are read" in refusal(folder)
        save_file(whole, folder / "model.safetensors")


def test_nothing_is_read_before_everything_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path)
    edit(folder, lambda tensors: tensors.pop("model.norm.weight"))
    monkeypatch.setattr(SafetensorsSource, "read", lambda self, name: pytest.fail(f"{name} was read"))
    assert "lacks model.norm.weight" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1000])
def test_truncated_file(keep: int, tmp_path: Path) -> None:
    folder = build(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is damaged or incomplete" in refusal(folder)


def test_damaged_header(tmp_path: Path) -> None:
    folder = build(tmp_path)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:12] = b"@@@@"
    path.write_bytes(data)
    assert "model.safetensors is damaged or incomplete" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "model-q4.gguf"])
def test_other_formats(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path)
    (folder / "model.safetensors").rename(folder / name)
    assert f"holds no safetensors, only {name}" in refusal(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = build(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "holds no weights (*.safetensors)" in refusal(folder)


def test_missing_shard(tmp_path: Path) -> None:
    folder = build(tmp_path, TinyModel(max_shard_size="60KB"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name}, named in {INDEX}" in refusal(folder)


def test_index_that_names_a_weight_its_file_lacks(tmp_path: Path) -> None:
    folder = build(tmp_path, TinyModel(max_shard_size="60KB"))
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][Q] = files[-1] if index["weight_map"][Q] != files[-1] else files[0]
    (folder / INDEX).write_text(json.dumps(index))
    assert f"says that {Q} is in" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read as JSON: "),
        ("[" * 10**5, "cannot be read as JSON: it is nested too deeply"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "weight_map is missing; it must be a file name for each weight"),
        ('{"weight_map": 3}', "weight_map must be a file name for each weight, got 3"),
        ('{"weight_map": []}', "weight_map must be a file name for each weight, got []"),
        ('{"weight_map": {}}', "weight_map must be a file name for each weight, got {}"),
    ],
)
def test_damaged_index(text: str, words: str, tmp_path: Path) -> None:
    folder = build(tmp_path)
    (folder / INDEX).write_text(text)
    message = refusal(folder)
    assert INDEX in message and words in message


@pytest.mark.parametrize(
    "file",
    ["/etc/passwd", "../x", "a/b.safetensors", "..", "", "a\\b.safetensors", "x.bin", 5, None, "\ud800.safetensors"],
)
def test_an_index_names_files_beside_it(file: Any, tmp_path: Path) -> None:
    folder = build(tmp_path)
    (folder / INDEX).write_text(json.dumps({"weight_map": {Q: file}}))
    expected = f"weight_map: the file of '{Q}' must be the name of a *.safetensors file beside it, got {file!r}."
    assert refusal(folder).endswith(expected)


def test_the_same_weight_in_two_files(tmp_path: Path) -> None:
    folder = build(tmp_path)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    save_file({Q: torch.ones(64, 64)}, folder / "two.safetensors")
    assert f"{Q} is in more than one file" in refusal(folder)


def test_window_beyond_the_model(tmp_path: Path) -> None:
    folder = build(tmp_path)
    with pytest.raises(StartupError, match="--max-model-len 513 is not possible"):
        load_model(folder, read_model(folder), torch.float32, 513, lambda fraction: None)


def test_destinations_name_every_tensor_of_a_checkpoint(tmp_path: Path) -> None:
    """The declared weight map against what transformers saves, for each variant of the family."""
    for name, tiny in VARIANTS.items():
        folder = build(tmp_path / name, tiny)
        saved: Mapping[str, torch.Tensor] = load_file(folder / "model.safetensors")
        destinations = load(folder).destinations()
        shapes = {key: tuple(tensor.shape) for key, tensor in saved.items()}
        if tiny.tied:
            shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
        assert {key: destination.shape for key, destination in destinations.items()} == shapes
