"""Reads the settings: default < YAML file < `OCTAVO_*` variables < flags. Remembers where each value came from.

    flags        MODEL, --max-model-len 32K, --max_model_len=32K, --enable-prefix-caching, --no-enable-prefix-caching;
                 several values: --api-key A --api-key B, or --api-key A B (behind MODEL)
    variables    OCTAVO_MAX_MODEL_LEN=32K, OCTAVO_ENABLE_PREFIX_CACHING=false, OCTAVO_API_KEY=A,B or '["A", "B"]';
                 an empty one counts as not set (compose files pass ${NAME:-} on)
    YAML         max-model-len: 32K, api_key: [A, B]; flat. OCTAVO_CONFIG names the file as --config does

This is the only file that reads `os.environ`. Whatever is not known is an error with a suggestion: a misspelt limit
that is silently ignored is worse than no limit.
"""

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from configs.errors import SettingsError, reason_of
from configs.settings import SECRET_FIELDS, Settings, did_you_mean, extra, flag
from configs.version import VERSION

PREFIX = "OCTAVO_"
FIELDS: Mapping[str, FieldInfo] = Settings.model_fields

_SERVICE_LINK = re.compile(r"OCTAVO_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""Variables that Kubernetes sets in every pod beside a service called 'octavo'. They are not meant for us."""

_DESCRIPTION = """\
Serve MODEL with an OpenAI-compatible API.

Every flag below is also a variable (--max-model-len: OCTAVO_MAX_MODEL_LEN) and a key of the YAML file that --config
names (max-model-len). A flag stands above a variable, a variable above the file, the file above the default. Dashes
and underscores are alike. Sizes may be written 4096, 32k (32,000), 32K (32,768), 2.5GiB."""


@dataclass(frozen=True)
class Loaded:
    """The settings and, for each of them, where it came from."""

    settings: Settings
    origins: Mapping[str, str]
    """Field name → 'default', the YAML file's path, 'OCTAVO_PORT', '--port' or 'MODEL'."""
    print_config: bool = False
    """Whether --print-config was given."""

    def describe(self) -> str:
        """All settings as a YAML file that --config can read, each with its origin; secrets are left out."""
        lines = [f"# Octavo {VERSION}: the settings and where each came from"]
        for name in FIELDS:
            value, meaning = self.settings.shown(name)
            origin, key = self.origins[name] + (f": {meaning}" if meaning else ""), flag(name)[2:]
            if name in SECRET_FIELDS and getattr(self.settings, name):
                count = len(value) if _is_list(name) else 1
                lines.append(f"# {key}: {count} not shown  # {origin}")
            else:
                lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}  # {origin}")
        return "\n".join(lines)


@dataclass
class _Source:
    """What one source says: raw values by field name, and where exactly each stands."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, origin: str) -> None:
        self.values[name] = value
        self.origins[name] = origin


def load(argv: Sequence[str], environ: Mapping[str, str] | None = None, others: Sequence[str] = ()) -> Loaded:
    """Settings from the arguments after `octavo serve` and the environment (`os.environ` unless given). `others`: flags
    that the caller has taken out itself, to be suggested too.

    Raises `SettingsError`, one sentence; --help and --version print and raise SystemExit(0).
    """
    flags = _parse_flags(argv, others)
    variables = _read_environment(os.environ if environ is None else environ)
    print_config = bool(flags.values.pop("print_config", False))
    config = flags.values.pop("config", variables.values.pop("config", None))
    sources = [variables, flags] if config is None else [_read_yaml(Path(config)), variables, flags]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    for source in sources:
        values |= source.values
        origins |= {name: source.origins[name] for name in source.values}
    return Loaded(Settings.create(values, origins), origins, print_config)


# ---------------------------------------------------------------- flags
class FlagParser(argparse.ArgumentParser):
    """Of a command, `prog`: what is wrong is raised as `SettingsError`, one sentence."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message.removeprefix('argument ')}; see {self.prog} --help.")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wide enough for our longest flag; the usage line stays short."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def make_parser() -> argparse.ArgumentParser:
    """A parser with one flag for each field of `Settings`, grouped. Values stay text: `Settings` reads them."""
    parser = FlagParser(
        prog="octavo serve",
        usage="octavo serve [MODEL] [flags]",
        description=_DESCRIPTION,
        formatter_class=_Formatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="A YAML file with settings.")
    parser.add_argument("--print-config", action="store_true", help="Print all settings and where each came from; end.")
    parser.add_argument("--version", action="version", version=f"octavo {VERSION}")
    for title in dict.fromkeys(extra(info, "group") for info in FIELDS.values()):
        group = parser.add_argument_group(title)
        for name, info in FIELDS.items():
            if extra(info, "group") == title:
                group.add_argument(flag(name), **_flag_options(name, info))
    return parser


def _flag_options(name: str, info: FieldInfo) -> dict[str, Any]:
    text = str(info.description)
    if default := default_of(info):
        text += f" (default: {default})"
    options: dict[str, Any] = {"help": text.replace("%", "%%")}
    if isinstance(info.default, bool):
        return options | {"action": argparse.BooleanOptionalAction}
    words = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
    options["metavar"] = "{" + ",".join(words) + "}" if words else extra(info, "metavar")
    return options | ({"action": "append", "nargs": "+"} if _is_list(name) else {})


def default_of(info: FieldInfo) -> str:
    """A default as people write it; nothing where there is none: an empty list."""
    if info.default in (None, ()):
        return extra(info, "word")
    return f"{info.default:g}" if isinstance(info.default, float) else str(info.default).lower()


def _parse_flags(argv: Sequence[str], others: Sequence[str]) -> _Source:
    """Flags and the one positional, MODEL, as raw values by field name (and 'config', 'print_config')."""
    parser = make_parser()
    found, rest = parser.parse_known_args([_dashed(argument) for argument in argv])
    for argument in rest:
        if argument.startswith("-") and argument != "--":
            name = argument.split("=")[0]
            known = [*_known_flags(), *others]
            raise SettingsError(f"unknown flag {name}{did_you_mean('--' + name.lstrip('-'), known)}")
    result = _Source()
    for name, value in vars(found).items():
        result.set(name, value, flag(name))
    _take_model(result, [argument for argument in rest if argument != "--"])
    for name in FIELDS:
        if _is_list(name) and name in result.values:
            result.values[name] = [item for occurrence in result.values[name] for item in occurrence]
    return result


def _known_flags() -> list[str]:
    negated = ["--no-" + flag(name)[2:] for name, info in FIELDS.items() if isinstance(info.default, bool)]
    return [*map(flag, FIELDS), *negated, "--config", "--print-config", "--version", "--help"]


def _take_model(result: _Source, positionals: list[str]) -> None:
    if len(positionals) > 1:
        raise SettingsError(f"one MODEL at most, got {positionals[0]!r} and {positionals[1]!r}.")
    if positionals:
        if result.values.get("model", positionals[0]) != positionals[0]:
            raise SettingsError(f"MODEL is {positionals[0]!r} and --model is {result.values['model']!r}: give one.")
        result.set("model", positionals[0], "MODEL")
    elif "model" not in result.values:
        _refuse_swallowed_model(result.values)


def _refuse_swallowed_model(values: Mapping[str, Any]) -> None:
    """`serve --api-key KEY MODEL` would make the model's name a second, guessable key and serve the default model."""
    for name in FIELDS:
        if _is_list(name) and any(len(occurrence) > 1 for occurrence in values.get(name, ())):
            raise SettingsError(
                f"{flag(name)} takes several values, so its last one may be meant as MODEL: put MODEL first, or repeat "
                f"{flag(name)} for each value."
            )


def _dashed(argument: str) -> str:
    """'--max_model_len=a_b' → '--max-model-len=a_b'"""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _is_list(name: str) -> bool:
    return isinstance(FIELDS[name].default, tuple)


# ---------------------------------------------------------------- environment
def environment_without_secrets() -> dict[str, str]:
    """This process's variables for a child that runs a model's code: without keys, passwords and the Hub's token."""
    secret = {PREFIX + field.upper() for field in SECRET_FIELDS} | {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
    return {name: value for name, value in os.environ.items() if name not in secret}


def _read_environment(environ: Mapping[str, str]) -> _Source:
    """`OCTAVO_*` as raw values by field name, and 'config'. Raises `SettingsError` for a name that is none of ours."""
    known = {PREFIX + name.upper(): name for name in (*FIELDS, "config")}
    result = _Source()
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX) or _is_service_link(variable, value):
            continue
        if variable not in known:
            raise SettingsError(f"unknown variable {variable}{did_you_mean(variable, known)}")
        if value:
            name = known[variable]
            is_list = name in FIELDS and _is_list(name)
            result.set(name, _split(value, variable) if is_list else value, variable)
    return result


def _is_service_link(variable: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(variable)) or (variable == "OCTAVO_PORT" and "://" in value)


def _split(text: str, variable: str) -> list[Any]:
    """'a, b' or '["a", "b"]'"""
    if not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",")]
    try:
        items = json.loads(text)
    except json.JSONDecodeError:
        raise SettingsError(f"{variable} begins like a JSON list but is none.") from None
    assert isinstance(items, list)
    return items


# ---------------------------------------------------------------- YAML
def _read_yaml(path: Path) -> _Source:
    """A flat file of settings. Raises `SettingsError`, also for a key that stands twice."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        document = loader.get_single_node()
        if document is None or document.tag == "tag:yaml.org,2002:null":
            return _Source()
        if not isinstance(document, yaml.MappingNode):
            raise SettingsError(f"--config {path} must hold lines of the form 'name: value'.")
        pairs = [(str(key.value), loader.construct_object(value, deep=True)) for key, value in document.value]
    except OSError as error:
        raise SettingsError(f"--config {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--config {path} is not UTF-8 text.") from None
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"--config {path} is not valid YAML{line}: {error.problem}.") from None
    except (yaml.YAMLError, ValueError) as error:  # control characters; impossible dates
        raise SettingsError(f"--config {path} is not valid YAML: {reason_of(error)}.") from None
    return _read_keys(pairs, path)


def _read_keys(pairs: Iterable[tuple[str, Any]], path: Path) -> _Source:
    result = _Source()
    for key, value in pairs:
        name = key.replace("-", "_")
        if name not in FIELDS:
            known = [flag(each)[2:] for each in FIELDS]
            raise SettingsError(f"unknown key {key!r} in {path}{did_you_mean(key.replace('_', '-'), known)}")
        if name in result.values:
            raise SettingsError(f"{key!r} stands twice in {path}.")
        result.set(name, value, str(path))
    return result
