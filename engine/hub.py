"""The Hugging Face Hub: which files of a repository are needed, fetching them, and what is in the way, in words.

Requests, cache, tokens, retries and mirrors (HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE) are the business of the
library huggingface_hub. A broken connection is taken up where it broke; files that are complete are never fetched
again. Only files that Octavo reads are fetched, never pickles, which can run code when they are read;
Python files only where they are asked for.
"""

import errno
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.model_fields import read_weight_map
from engine.errors import StartupError, reason_of

Progress = Callable[[str, float], None]
"""Gets what is going on, in words, and the fraction of it that is done."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
MAX_CHOICES = 16
ATTEMPTS = 3
"""A file whose connection broke in a way that the library does not mend is begun anew so often."""
MARGIN_BYTES = 64 << 20
"""Room that is left on the disk beside what is fetched."""


logger = logging.getLogger("octavo.hub")


class NotFetched(Exception):
    """The Hub did not give it; the text says why and has no full stop."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for."""

    repository: str
    revision: str | None = None
    """None: the default branch."""
    file: str | None = None
    """A GGUF file of the repository; None: the model in its own format, or the only GGUF file."""
    with_tokenizer: bool = True
    """False: the tokenizer comes from elsewhere."""
    with_code: bool = False
    """The model's own Python files too."""

    @classmethod
    def parse(cls, name: str, **options: Any) -> "Wanted | None":
        """'REPOSITORY' or 'REPOSITORY:FILE.gguf'; None for what is neither."""
        repository, colon, file = name.partition(":")
        if not HUB_ID.fullmatch(repository) or (colon and not file.endswith(".gguf")):
            return None
        return cls(repository, file=file or None, **options)


@dataclass(frozen=True)
class _Listing:
    """Files of one commit and their sizes."""

    commit: str
    sizes: Mapping[str, int]


def fetch_model(wanted: Wanted, check: Callable[[Path], object], progress: Progress) -> tuple[Path, bool]:
    """A folder of the model's files or a GGUF file, and whether all of it had been there before.

    `check` sees the folder with config.json before any weights are fetched. Raises `NotFetched`, and what `check` does.
    """
    try:
        listing = _list(wanted)
    except _Unavailable as error:
        return _cached_model(wanted, error), True
    names = _needed(listing.sizes, wanted)
    weights = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    small = [name for name in names if name not in weights]
    if small:
        folder, _ = _download(wanted, listing, small, progress)
        check(folder)
    folder, was_there = _download(wanted, listing, names, progress)
    return (folder if small else folder / weights[0]), was_there


def cached_model(wanted: Wanted) -> Path:
    """What `fetch_model` has fetched. Asks nobody; raises `NotFetched` that says what is missing."""
    return _cached_model(wanted, _Unavailable("it was not fetched yet", is_refusal=True))


def fetch_config(wanted: Wanted, progress: Progress) -> tuple[Path, bool]:
    """A folder with config.json, and Python files where they are asked for, or a GGUF file that had been fetched; and
    whether it had all been there before. Never weights. Raises `NotFetched`."""
    if wanted.file is not None:
        try:
            return cached_model(wanted), True
        except NotFetched:
            raise NotFetched(
                "the sizes of a GGUF model stand in the file itself, which was not fetched yet; name the repository "
                "that has this model with a config.json"
            ) from None
    try:
        listing = _list(wanted)
    except _Unavailable as error:
        folder = _cached_folder(wanted, error)
        if not (folder / CONFIG).is_file():
            raise NotFetched(f"{error}, and the copy in the cache lacks {CONFIG}") from None
        return folder, True
    if CONFIG not in listing.sizes:
        raise NotFetched(f"it has no {CONFIG}")
    code = [name for name in listing.sizes if wanted.with_code and name.endswith(".py") and "/" not in name]
    return _download(wanted, listing, [CONFIG, *code], progress)


def fetch_tokenizer(wanted: Wanted, progress: Progress) -> Path:
    """A folder with the tokenizer's files. Raises `NotFetched`."""
    try:
        listing = _list(wanted)
    except _Unavailable as error:
        folder = _cached_folder(wanted, error)
        if not (folder / TOKENIZER_FILES[0]).is_file():
            raise NotFetched(f"{error}, and the copy in the cache lacks {TOKENIZER_FILES[0]}") from None
        return folder
    if TOKENIZER_FILES[0] not in listing.sizes:
        raise NotFetched(f"it has no {TOKENIZER_FILES[0]}")
    return _download(wanted, listing, [name for name in TOKENIZER_FILES if name in listing.sizes], progress)[0]


# ------------------------------------------------------------------ which files
def _needed(names: Iterable[str], wanted: Wanted) -> list[str]:
    """Files to fetch, or one GGUF file. Raises `NotFetched` for a repository that holds no model we read."""
    top = sorted(name for name in names if "/" not in name)
    ggufs = sorted(name for name in names if name.endswith(".gguf") and not name.startswith("mmproj"))
    if wanted.file is not None:
        if wanted.file not in names:
            raise NotFetched(f"it has no file {wanted.file}{_choices(wanted, ggufs)}")
        return [_whole(wanted.file)]
    weights = _weights(top)
    if weights and "config.json" in top:
        if wanted.with_tokenizer and TOKENIZER_FILES[0] not in top:
            raise NotFetched(
                f"it has no {TOKENIZER_FILES[0]}; name a repository or folder that has this model's with --tokenizer"
            )
        code = [name for name in top if wanted.with_code and name.endswith(".py")]
        return [name for name in top if name in (*TOKENIZER_FILES, INDEX)] + code + weights
    if len(ggufs) == 1:
        return [_whole(ggufs[0])]
    if ggufs:
        raise NotFetched(f"it has several GGUF files{_choices(wanted, ggufs)}")
    if "adapter_config.json" in top:
        raise NotFetched("it holds an adapter, not a whole model")
    if pickles := [name for name in top if name.endswith(PICKLES)]:
        raise NotFetched(
            f"its weights are pickles ({pickles[0]}), which can run code when they are read: use a repository with "
            "*.safetensors, or convert them"
        )
    raise NotFetched(f"it has no {'config.json' if weights else '*.safetensors weights'}")


def _weights(top: Iterable[str]) -> list[str]:
    """The shards, or the one file; copies of them in other layouts and precisions are left alone."""
    names = [name for name in top if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter"))]
    if INDEX in top:
        return [name for name in names if SHARD.fullmatch(name)] or names
    return [SINGLE] if SINGLE in names else names


def _whole(file: str) -> str:
    if SPLIT_GGUF.search(file):
        raise NotFetched(f"{file} is a part of a split GGUF file: merge it first, with llama-gguf-split --merge")
    return file


def _choices(wanted: Wanted, ggufs: list[str]) -> str:
    if not ggufs:
        return ""
    shown = ", ".join(f"{wanted.repository}:{name}" for name in ggufs[:MAX_CHOICES])
    more = f" and {len(ggufs) - MAX_CHOICES} more" if len(ggufs) > MAX_CHOICES else ""
    return f"; name one of them: {shown}{more}"


# ------------------------------------------------------------------ the network
class _Unavailable(Exception):
    """The Hub cannot be asked, or refuses; a copy in the cache may serve. The text says why and has no full stop."""

    def __init__(self, words: str, is_refusal: bool) -> None:
        super().__init__(words)
        self.is_refusal = is_refusal


def _list(wanted: Wanted) -> _Listing:
    """Raises `_Unavailable` or `NotFetched`."""
    from huggingface_hub import HfApi, errors

    _log_as_we_do()
    try:
        info = HfApi().model_info(wanted.repository, revision=wanted.revision, files_metadata=True)
    except errors.RevisionNotFoundError:
        raise NotFetched(f"it has no revision {wanted.revision!r} (--revision)") from None
    except errors.HFValidationError:
        raise NotFetched(f"{wanted.repository!r} is no valid id of a repository") from None
    except Exception as error:  # which HTTP library it stands on, and so what it raises, differs by version
        status = _status(error)
        raise _Unavailable(_words(error, wanted), status is not None and status < 500) from None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Listing(info.sha or "", sizes)


def _download(wanted: Wanted, listing: _Listing, names: list[str], progress: Progress) -> tuple[Path, bool]:
    """The folder that holds `names`, and whether they were all there before. Raises `NotFetched`."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    missing = [
        name
        for name in names
        if not isinstance(try_to_load_from_cache(wanted.repository, name, revision=listing.commit), str)
    ]
    total = sum(listing.sizes[name] for name in missing)
    phase = f"downloading {wanted.repository} from the Hugging Face Hub ({_human(total)})"
    if missing:
        _require_room(total)
        progress(phase, 0.0)
    bar = _bar(lambda done: progress(phase, min(done / total, 1.0) if total else 1.0))
    for attempt in range(1, ATTEMPTS + 1):
        try:
            folder = snapshot_download(
                wanted.repository, revision=wanted.revision, allow_patterns=names, tqdm_class=bar, max_workers=4
            )
            break
        except Exception as error:
            if attempt == ATTEMPTS or isinstance(error, OSError):  # the Hub's own answers and the disk's are OSErrors
                raise NotFetched(_words(error, wanted)) from None
            logger.warning("%s: %s; trying again", wanted.repository, _words(error, wanted))
    if missing:
        progress(phase, 1.0)
    return Path(folder), not missing


def _require_room(size: int) -> None:
    """Raises `NotFetched` before the disk is full, not when it is."""
    from huggingface_hub.constants import HF_HUB_CACHE

    place = next(folder for folder in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if size + MARGIN_BYTES > free:
        raise NotFetched(
            f"it takes {_human(size)} and {HF_HUB_CACHE} has {_human(free)} left: make room, or set HF_HOME to a "
            "folder on a larger disk"
        )


def _bar(report: Callable[[float], None]) -> Any:
    """A class of progress bars that draw nothing and report bytes: of several the fullest counts, as network and disk
    have one each."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                report(self.n)

    return Bar


def _log_as_we_do() -> None:
    """Its messages (that a connection broke and is taken up again) go where ours go."""
    logger = logging.getLogger("huggingface_hub")
    logger.handlers.clear()
    logger.propagate = True


# ------------------------------------------------------------------ the cache
def _cached_folder(wanted: Wanted, why: _Unavailable) -> Path:
    """The snapshot on this machine. Raises `NotFetched`."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(
            snapshot_download(wanted.repository, revision=wanted.revision, allow_patterns=[], local_files_only=True)
        )
    except errors.LocalEntryNotFoundError:
        if why.is_refusal:
            raise NotFetched(str(why)) from None
        revision = f" of revision {wanted.revision!r}" if wanted.revision else ""
        raise NotFetched(f"{why}, and there is no copy{revision} in the cache") from None


def _cached_model(wanted: Wanted, why: _Unavailable) -> Path:
    """A model that was fetched earlier. Raises `NotFetched` that says what is missing."""
    folder = _cached_folder(wanted, why)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        needed = _needed(names, wanted)
    except NotFetched as error:
        raise NotFetched(f"{why}, and the copy in the cache is not complete: {error}") from None
    if len(needed) == 1:
        return folder / needed[0]
    if missing := sorted(_all_shards(folder, needed) - set(names)):
        raise NotFetched(f"{why}, and the copy in the cache lacks {', '.join(missing[:3])}")
    return folder


def _all_shards(folder: Path, names: list[str]) -> set[str]:
    """Weight files that there must be, as the index or, without one, a shard's own name says."""
    index = folder / INDEX
    if index.is_file():
        return set(read_weight_map(index).values())
    counts = [int(match[1]) for name in names if (match := SHARD.fullmatch(name))]
    if not counts:
        return set()
    return {f"model-{number:05}-of-{counts[0]:05}.safetensors" for number in range(1, counts[0] + 1)} | {INDEX}


# ------------------------------------------------------------------ words
def _words(error: Exception, wanted: Wanted) -> str:
    """What is in the way, in words for the person who starts the server."""
    from huggingface_hub import constants, errors, get_token

    page = f"{constants.ENDPOINT}/{wanted.repository}"
    status = _status(error)
    if isinstance(error, errors.GatedRepoError):
        if get_token() is None:
            return f"access to it must be granted: accept its licence at {page}, then set HF_TOKEN to your token"
        return f"the account of HF_TOKEN has no access to it: accept its licence at {page}"
    if isinstance(error, errors.RepositoryNotFoundError):
        if get_token() is None:
            return "there is no such repository, or it is private or gated and HF_TOKEN is not set"
        return "there is no such repository, or the account of HF_TOKEN may not see it"
    if status == 401:
        return "the Hub does not take the token in HF_TOKEN"
    if status == 403:
        return f"the Hub refuses access (403); see {page}, and what the token in HF_TOKEN may do"
    if status is not None:
        return f"the Hub answers with an error ({status}); try again later"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk with {constants.HF_HUB_CACHE} is full: make room, or set HF_HOME to a folder on a larger one"
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"{error.filename} cannot be written: {error.strerror}"
    return f"the Hub at {constants.ENDPOINT} cannot be reached ({reason_of(error)})"


def _status(error: Exception) -> int | None:
    """Of an answer of the Hub."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _human(size: int) -> str:
    """Decimal units, as the Hub's pages have them."""
    value, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def refusal(wanted: Wanted, flag: str, error: NotFetched) -> StartupError:
    """The sentence about a Hub id given with `flag`."""
    name = wanted.repository + (f":{wanted.file}" if wanted.file else "")
    return StartupError(f"{flag}: {name} is no local path, and the Hub did not give it: {error}.")
