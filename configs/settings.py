"""The one declaration of what can be set: names, types, defaults, limits and help.

A field `max_model_len` is the flag `--max-model-len`, the variable `OCTAVO_MAX_MODEL_LEN` and the YAML key
`max-model-len`; `configs/load.py` reads all three. Names are vLLM's wherever the meaning is the same. A field exists
from the day it works.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from configs.errors import SettingsError
from configs.limits import Policy

Group = Literal["Model", "KV cache", "Scheduling", "Queue", "HTTP", "Metrics and log", "Machine"]
Unset = tuple[Literal["auto", "none"], str]
"""How to write that a field has no value of its own, and what then holds: 'auto', Octavo chooses; 'none', no limit."""
NO_LIMIT: Unset = ("none", "no limit")
SECRET_FIELDS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
"""Values never shown: not in --print-config, not in an error, not in repr()."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)(b?)|b)?", re.IGNORECASE | re.ASCII)
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_NOTHING = ("none", "null")
_API_KEY = re.compile(r"[\x21-\x7e]+")
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)


def parse_size(text: str) -> int:
    """A count of tokens or bytes as people write it.

    As in vLLM, a small letter counts in thousands and a capital one in 1024s: '32k' is 32,000 and '32K' 32,768. With
    units the usual rule holds: 'KiB', 'MiB', 'GiB' are powers of 1024, 'kB', 'MB', 'GB' powers of 1000 (any case).
    A fraction needs a suffix and is rounded down to a whole number. Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or ("." in match[1] and match[2] is None):
        raise ValueError("must be a size such as 4096, 32K, 1.5M or 2.5GiB")
    number, letter, binary, unit = match[1], match[2], match[3], match[4]
    if letter is None:
        return int(number)
    base = 1024 if binary or (letter.isupper() and not unit) else 1000
    return int(Fraction(number) * base ** _POWER[letter.lower()])


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _minus_one(value: Any) -> Any:
    return None if value == -1 or (isinstance(value, str) and value.strip() == "-1") else value


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _api_key(value: str) -> str:
    if not _API_KEY.fullmatch(value):
        raise ValueError("must be printable ASCII without spaces, and not empty")
    return value


def _root_path(value: str) -> str:
    if value and not _ROOT_PATH.fullmatch(value):
        raise ValueError("must begin with a slash and must not end with one, like /llm")
    return value


def _block_size(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


Text = Annotated[str, AfterValidator(_not_empty)]
Size = Annotated[int, BeforeValidator(_size)]
WindowSize = Annotated[int | None, BeforeValidator(_size), BeforeValidator(_minus_one)]
BlockSize = Annotated[int, AfterValidator(_block_size)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_several)]
AdminKey = Annotated[str, AfterValidator(_api_key)]
RootPath = Annotated[str, AfterValidator(_root_path)]
ApiKeys = Annotated[tuple[Annotated[str, AfterValidator(_api_key)], ...], BeforeValidator(_several)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]


def _setting(default: Any, group: Group, metavar: str, help: str, unset: Unset | None = None, **limits: Any) -> Any:
    """A field with its help; `metavar` stands for the value in --help (words of a Literal are shown instead), `limits`
    are pydantic's (ge, gt, le, …)."""
    word, meaning = unset or ("", "")
    if word:
        help += f" {word}: {meaning}."
    notes: dict[str, JsonValue] = {"group": group, "metavar": metavar, "word": word, "meaning": meaning}
    return Field(default, description=help, json_schema_extra=notes, **limits)


class Settings(BaseModel):
    """Everything Octavo was told. Frozen; what is found out later (blocks, effective window) is kept elsewhere.

    `Settings.create` gives errors in one sentence, as the command line wants them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    # ---------------------------------------------------------------- model
    model: Text | None = _setting(
        None,
        "Model",
        "MODEL",
        "A Hugging Face Hub id, a local folder of safetensors or a .gguf file.",
        ("auto", "SmolLM2-135M-Instruct"),
    )
    served_model_name: Texts = _setting(
        (),
        "Model",
        "NAME",
        "Names under which clients ask for the model; an answer bears the name that was asked for, or the first. "
        "Without it: the model as given at start.",
    )
    revision: Text | None = _setting(
        None,
        "Model",
        "REVISION",
        "Branch, tag or commit of the model on the Hub.",
        ("auto", "its default branch"),
    )
    tokenizer: Text | None = _setting(
        None,
        "Model",
        "TOKENIZER",
        "A Hub id or a local folder whose tokenizer and chat template are used in place of the model's.",
        ("auto", "the model's own"),
    )
    trust_remote_code: bool = _setting(
        False,
        "Model",
        "BOOL",
        "Run Python code that comes with the model, where the library transformers has none for it. That code can do "
        "whatever you can: only for authors you trust.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _setting(
        "auto",
        "Model",
        "",
        "Number format of weights and KV cache; float16 on GPUs only.",
        ("auto", "bfloat16 where the device computes in it, else float32, or float16 on a GPU that is fast in it"),
    )
    max_model_len: WindowSize = _setting(
        None,
        "Model",
        "TOKENS",
        "Longest sequence, prompt and output together; lowered, with a warning, to what the KV cache can hold. -1 "
        "means auto.",
        ("auto", "the model's own window"),
        ge=2,
    )
    chat_template: Text | None = _setting(
        None,
        "Model",
        "TEMPLATE",
        "A file with a Jinja chat template, or the template itself.",
        ("auto", "the model's own"),
    )

    # ---------------------------------------------------------------- KV cache
    block_size: BlockSize = _setting(
        16, "KV cache", "TOKENS", "Tokens in one KV page: a power of two from 4 to 128.", ge=4, le=128
    )
    gpu_memory_utilization: float | None = _setting(
        None,
        "KV cache",
        "FRACTION",
        "Share of the memory available at start that weights and KV cache may take together; a step's work too, "
        "on a GPU. On a CPU: of main memory.",
        (
            "auto",
            "0.9 on a GPU; on a CPU the KV cache takes half of what the weights leave, at most 4 GiB and no more than "
            "--max-num-seqs full windows can use",
        ),
        gt=0.0,
        le=1.0,
    )
    kv_cache_memory_bytes: Size | None = _setting(
        None,
        "KV cache",
        "BYTES",
        "Size of the KV cache, e.g. 2.5GiB. Stands above --gpu-memory-utilization.",
        ("auto", "as --gpu-memory-utilization says"),
        ge=1,
    )
    num_gpu_blocks_override: int | None = _setting(
        None,
        "KV cache",
        "N",
        "Size of the KV cache in pages, on a CPU too. Stands above --kv-cache-memory-bytes.",
        ("auto", "as --kv-cache-memory-bytes or --gpu-memory-utilization says"),
        ge=1,
    )
    enable_prefix_caching: bool = _setting(
        True, "KV cache", "", "Keep the pages of finished requests and share them between requests that begin alike."
    )
    cache_sharing: Literal["key", "global"] = _setting(
        "key",
        "KV cache",
        "",
        "Who shares cached prefixes. key: only requests with the same API key; global: everybody.",
    )

    # ---------------------------------------------------------------- scheduling
    max_num_seqs: int = _setting(128, "Scheduling", "N", "Sequences that run at once.", ge=1, le=65536)
    max_num_batched_tokens: Size = _setting(
        512,
        "Scheduling",
        "TOKENS",
        "Tokens computed in one step. Longer prompts are computed in chunks of at most this size beside running "
        "streams: larger is better for throughput, smaller for smooth streams.",
        ge=1,
    )
    scheduling_policy: Policy = _setting(
        "fcfs",
        "Scheduling",
        "",
        "fcfs: in order of arrival. priority: requests may say how urgent they are; a level is worth 10 seconds of "
        "waiting, so that nobody starves.",
    )

    # ---------------------------------------------------------------- queue
    max_num_queued_reqs: int | None = _setting(
        256, "Queue", "N", "Sequences that may wait; beyond that: 503 with Retry-After.", NO_LIMIT, ge=0
    )
    max_num_queued_tokens: Size | None = _setting(
        524288,
        "Queue",
        "TOKENS",
        "Prompt tokens that may wait; beyond that: 503 with Retry-After. A lone request may exceed it.",
        NO_LIMIT,
        ge=1,
    )
    queue_timeout: float | None = _setting(
        300.0, "Queue", "SECONDS", "A request that has waited this long is given up with 503.", NO_LIMIT, gt=0
    )

    # ---------------------------------------------------------------- HTTP
    host: Text | None = _setting(
        None,
        "HTTP",
        "ADDRESS",
        "Address to listen on.",
        ("auto", "127.0.0.1, or 0.0.0.0 where an API key is set"),
    )
    port: int = _setting(8000, "HTTP", "PORT", "Port to listen on; 0: any free one.", ge=0, le=65535)
    api_key: ApiKeys = _setting(
        (),
        "HTTP",
        "KEY",
        "Keys of which a client must send one as a bearer token. Without it: open to all.",
        repr=False,
    )
    admin_api_key: AdminKey | None = _setting(
        None,
        "HTTP",
        "KEY",
        "The key for routes that act on the server itself, such as /abort_requests. It opens all others too.",
        ("none", "those routes are closed"),
        repr=False,
    )
    ssl_certfile: Text | None = _setting(
        None,
        "HTTP",
        "FILE",
        "The server's certificate, in PEM, those that signed it behind it. With it: HTTPS.",
        ("none", "plain HTTP"),
    )
    ssl_keyfile: Text | None = _setting(
        None,
        "HTTP",
        "FILE",
        "The certificate's private key, in PEM.",
        ("none", "it stands in --ssl-certfile"),
    )
    ssl_keyfile_password: Text | None = _setting(
        None,
        "HTTP",
        "PASSWORD",
        "What --ssl-keyfile is encrypted with.",
        ("none", "it is not encrypted"),
        repr=False,
    )
    ssl_ca_certs: Text | None = _setting(
        None,
        "HTTP",
        "FILE",
        "Authorities, in PEM: each client must show a certificate that one of them has signed.",
        ("none", "clients need no certificate"),
    )
    root_path: RootPath = _setting(
        "",
        "HTTP",
        "PATH",
        "The path under which a reverse proxy shows this server, such as /llm. Requests may come with it or without.",
    )
    sse_keep_alive_interval: float = _setting(
        15.0, "HTTP", "SECONDS", "A stream that has been silent this long gets a comment line. 0: never.", ge=0
    )
    shutdown_timeout: float = _setting(
        30.0, "HTTP", "SECONDS", "How long open requests may go on after SIGTERM. 0: they are aborted at once.", ge=0
    )

    # ---------------------------------------------------------------- metrics and log
    protect_metrics: bool = _setting(False, "Metrics and log", "", "Ask for the API key at /metrics too.")
    metrics_compat: Literal["vllm", "none"] = _setting(
        "vllm",
        "Metrics and log",
        "",
        "vllm: /metrics has vLLM's names beside octavo_*, for existing dashboards and gateways. none: octavo_* alone.",
    )
    log_level: LogLevel = _setting("info", "Metrics and log", "", "The least important messages that are logged.")
    log_format: Literal["auto", "text", "json"] = _setting(
        "auto",
        "Metrics and log",
        "",
        "How messages are written. text: a line of words; json: a JSON object a line.",
        ("auto", "text on a terminal, json elsewhere"),
    )

    # ---------------------------------------------------------------- machine
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "auto",
        "Machine",
        "",
        "What computes. cuda: the first GPU that CUDA_VISIBLE_DEVICES leaves visible.",
        ("auto", "a GPU where there is one, else the CPU"),
    )
    num_threads: int | None = _setting(
        None,
        "Machine",
        "N",
        "Threads that compute; on a GPU those that sample.",
        ("auto", "one for each physical core that Octavo may use"),
        ge=1,
        le=4096,
    )
    watchdog_timeout: float | None = _setting(
        300.0,
        "Machine",
        "SECONDS",
        "An engine that has work and says nothing for this long is given up: /health turns 503.",
        ("none", "never"),
        gt=0,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain_words(cls, value: Any, info: ValidationInfo) -> Any:
        """'none', and 'auto' where Octavo then chooses, mean None; a bool (YAML reads `on` as one) is no number."""
        assert info.field_name is not None
        field = cls.model_fields[info.field_name]
        words = (*_NOTHING, extra(field, "word")) if type(None) in get_args(field.annotation) else ()
        if isinstance(value, str) and value.strip().lower() in words:
            return None
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("must not be true or false (a word in YAML may need quotes)")
        return value

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        if self.admin_api_key is not None and self.admin_api_key in self.api_key:
            raise ValueError("--admin-api-key must differ from every --api-key, since it may do more")
        return self

    @model_validator(mode="after")
    def _budget_holds_all_sequences(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens must be at least --max-num-seqs, since each running sequence needs one "
                f"token a step: got {self.max_num_batched_tokens} and {self.max_num_seqs}"
            )
        return self

    @classmethod
    def create(cls, values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Self:
        """From field names and raw values (text or YAML scalars).

        `origins` says in words where a value came from. Raises `SettingsError`: one sentence with name, value, limit.
        """
        for name in values:
            if name not in cls.model_fields:
                raise SettingsError(f"unknown setting {name!r}{did_you_mean(name, cls.model_fields)}")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise SettingsError(_sentence(error.errors(include_url=False)[0], values, origins or {})) from None

    @property
    def bind_host(self) -> str:
        """Where to listen: closed to the network unless a key guards the API or --host says otherwise."""
        if self.host is not None:
            return self.host
        return "0.0.0.0" if self.api_key else "127.0.0.1"

    def shown(self, name: str) -> tuple[Any, str]:
        """A field as people may write it, 'auto' or 'none' in place of None, and in words what a word comes to."""
        value, field = getattr(self, name), type(self).model_fields[name]
        if name == "host" and value is None:
            return "auto", self.bind_host + (", since an API key is set" if self.api_key else "")
        word = extra(field, "word")
        if word and value in (None, word):
            return word, extra(field, "meaning")
        return value, ""


def flag(name: str) -> str:
    """'max_model_len' → '--max-model-len'"""
    return "--" + name.replace("_", "-")


def extra(field: FieldInfo, key: Literal["group", "metavar", "word", "meaning"]) -> str:
    """What `_setting` noted about a field."""
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra[key])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: ": did you mean 'X'?", or '.' when no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else "."


def _sentence(error: ErrorDetails, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """One pydantic error in words: "--port must be less than or equal to 65535, got '70000' (from OCTAVO_PORT)." """
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # about several fields; says all itself
        return f"{message}."
    name = str(error["loc"][0])
    message = re.sub(r"^Input should be", "must be", message).split(", unable")[0].split(", got")[0]
    given = values[name] if len(error["loc"]) == 1 else error["input"]
    value = "" if name in SECRET_FIELDS else f", got {given!r}"
    origin = origins.get(name, "")
    source = f" (from {origin})" if origin and not origin.startswith("--") else ""
    return f"{flag(name)} {message}{value}{source}."
