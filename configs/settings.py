"""The one declaration of what can be set: names, types, defaults, limits and help.

A field `max_model_len` is the flag `--max-model-len`, the variable `OCTAVO_MAX_MODEL_LEN` and the YAML key
`max-model-len`; `configs/load.py` reads all three. Names are vLLM's wherever the meaning is the same. A field exists
from the day it works.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from configs.errors import SettingsError
from configs.limits import Policy
from configs.model import Quantization
from configs.setting_types import (
    NO_LIMIT,
    NOTHING,
    AdminKey,
    ApiKeys,
    BlockSize,
    KVDtype,
    KVLayers,
    LogLevel,
    RootPath,
    Size,
    Text,
    Texts,
    WindowSize,
    setting,
)

SECRET_FIELDS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
"""Values never shown: not in --print-config, not in an error, not in repr()."""
STEP_TOKENS, GPU_STEP_TOKENS = 512, 2048
"""Of the largest step, unless --max-num-batched-tokens says otherwise. Telling a GPU of a step's kernels takes the host
some milliseconds, however few tokens they compute."""


class Settings(BaseModel):
    """Everything Octavo was told. Frozen; what is found out later (blocks, effective window) is kept elsewhere.

    `Settings.create` gives errors in one sentence, as the command line wants them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    # ---------------------------------------------------------------- model
    model: Text | None = setting(
        None,
        "Model",
        "MODEL",
        "A Hugging Face Hub id, a local folder of safetensors or a .gguf file.",
        ("auto", "SmolLM2-135M-Instruct"),
    )
    served_model_name: Texts = setting(
        (),
        "Model",
        "NAME",
        "Names under which clients ask for the model; an answer bears the name that was asked for, or the first. "
        "Without it: the model as given at start.",
    )
    revision: Text | None = setting(
        None,
        "Model",
        "REVISION",
        "Branch, tag or commit of the model on the Hub.",
        ("auto", "its default branch"),
    )
    tokenizer: Text | None = setting(
        None,
        "Model",
        "TOKENIZER",
        "A Hub id or a local folder whose tokenizer and chat template are used in place of the model's.",
        ("auto", "the model's own"),
    )
    trust_remote_code: bool = setting(
        False,
        "Model",
        "BOOL",
        "Run Python code that comes with the model, where the library transformers has none for it. That code can do "
        "whatever you can: only for authors you trust.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto",
        "Model",
        "",
        "Number format of weights and arithmetic; float16 on GPUs only.",
        ("auto", "bfloat16 where the device computes in it, else float32, or float16 on a GPU that is fast in it"),
    )
    quantization: Quantization = setting(
        "auto",
        "Model",
        "",
        "Number format in which the weights of linear layers are kept, the head's among them. int8: half of what "
        "bfloat16 takes, faster while few sequences run, answers change a little. none: the format that --dtype says.",
        ("auto", "none, but on a CPU what a GGUF file has in 4 to 8 bits stays so, which changes no answer"),
    )
    max_model_len: WindowSize = setting(
        None,
        "Model",
        "TOKENS",
        "Longest sequence, prompt and output together; lowered, with a warning, to what the KV cache can hold. -1 "
        "means auto.",
        ("auto", "the model's own window"),
        ge=2,
    )
    chat_template: Text | None = setting(
        None,
        "Model",
        "TEMPLATE",
        "A file with a Jinja chat template, or the template itself.",
        ("auto", "the model's own"),
    )

    # ---------------------------------------------------------------- KV cache
    block_size: BlockSize = setting(
        16, "KV cache", "TOKENS", "Tokens in one KV page: a power of two from 4 to 256.", ge=4, le=256
    )
    gpu_memory_utilization: float | None = setting(
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
    kv_cache_memory_bytes: Size | None = setting(
        None,
        "KV cache",
        "BYTES",
        "Size of the KV cache, e.g. 2.5GiB. Stands above --gpu-memory-utilization.",
        ("auto", "as --gpu-memory-utilization says"),
        ge=1,
    )
    num_gpu_blocks_override: int | None = setting(
        None,
        "KV cache",
        "N",
        "Size of the KV cache in pages, on a CPU too. Stands above --kv-cache-memory-bytes.",
        ("auto", "as --kv-cache-memory-bytes or --gpu-memory-utilization says"),
        ge=1,
    )
    enable_prefix_caching: bool = setting(
        True, "KV cache", "", "Keep the pages of finished requests and share them between requests that begin alike."
    )
    kv_cache_dtype: KVDtype = setting(
        "auto",
        "KV cache",
        "",
        "Number format in which keys and values are kept; fp8 is fp8_e4m3. fp8, int8 and int4 are quantised: the cache "
        "holds two to four times the tokens, and answers change a little.",
        ("auto", "the format that --dtype says"),
    )
    kv_cache_dtype_v: KVDtype = setting(
        "auto",
        "KV cache",
        "",
        "Number format of the values, where it is not that of the keys.",
        ("auto", "as --kv-cache-dtype says"),
    )
    kv_cache_dtype_skip_layers: KVLayers = setting(
        (),
        "KV cache",
        "LAYER",
        "Layers whose keys and values stay in the format that --dtype says: their numbers, from 0 on, sliding_window "
        "for all that have one, or none.",
        ("auto", "sliding_window where the format is quantised and other layers are left, else none"),
    )
    kv_cache_scales: Text | None = setting(
        None,
        "KV cache",
        "FILE",
        "Scales for fp8 and int8 that octavo calibrate has found for this model, in place of one for each token and "
        "head.",
        ("none", "each token's own numbers give its scales"),
    )
    kv_refresh_interval: Size | None = setting(
        None,
        "KV cache",
        "TOKENS",
        "A quantised cache of a sequence is computed anew, in full precision, whenever so many more tokens have been "
        "generated, so that errors do not build up.",
        ("none", "never"),
        ge=1,
    )
    cache_sharing: Literal["key", "global"] = setting(
        "key",
        "KV cache",
        "",
        "Who shares cached prefixes. key: only requests with the same API key; global: everybody.",
    )

    # ---------------------------------------------------------------- scheduling
    max_num_seqs: int = setting(128, "Scheduling", "N", "Sequences that run at once.", ge=1, le=65536)
    max_num_batched_tokens: Size | None = setting(
        None,
        "Scheduling",
        "TOKENS",
        "Tokens computed in one step. Longer prompts are computed in chunks of at most this size beside running "
        "streams: larger is better for throughput, smaller for smooth streams.",
        ("auto", f"{STEP_TOKENS:,} on a CPU, {GPU_STEP_TOKENS:,} on a GPU, or --max-num-seqs if that is more"),
        ge=1,
    )
    scheduling_policy: Policy = setting(
        "fcfs",
        "Scheduling",
        "",
        "fcfs: in order of arrival. priority: requests may say how urgent they are; a level is worth 10 seconds of "
        "waiting, so that nobody starves.",
    )

    # ---------------------------------------------------------------- queue
    max_num_queued_reqs: int | None = setting(
        256, "Queue", "N", "Sequences that may wait; beyond that: 503 with Retry-After.", NO_LIMIT, ge=0
    )
    max_num_queued_tokens: Size | None = setting(
        524288,
        "Queue",
        "TOKENS",
        "Prompt tokens that may wait; beyond that: 503 with Retry-After. A lone request may exceed it.",
        NO_LIMIT,
        ge=1,
    )
    queue_timeout: float | None = setting(
        300.0, "Queue", "SECONDS", "A request that has waited this long is given up with 503.", NO_LIMIT, gt=0
    )

    # ---------------------------------------------------------------- HTTP
    host: Text | None = setting(
        None,
        "HTTP",
        "ADDRESS",
        "Address to listen on.",
        ("auto", "127.0.0.1, or 0.0.0.0 where an API key is set"),
    )
    port: int = setting(8000, "HTTP", "PORT", "Port to listen on; 0: any free one.", ge=0, le=65535)
    api_key: ApiKeys = setting(
        (),
        "HTTP",
        "KEY",
        "Keys of which a client must send one as a bearer token. Without it: open to all.",
        repr=False,
    )
    admin_api_key: AdminKey | None = setting(
        None,
        "HTTP",
        "KEY",
        "The key for routes that act on the server itself, such as /abort_requests. It opens all others too.",
        ("none", "those routes are closed"),
        repr=False,
    )
    ssl_certfile: Text | None = setting(
        None,
        "HTTP",
        "FILE",
        "The server's certificate, in PEM, those that signed it behind it. With it: HTTPS.",
        ("none", "plain HTTP"),
    )
    ssl_keyfile: Text | None = setting(
        None,
        "HTTP",
        "FILE",
        "The certificate's private key, in PEM.",
        ("none", "it stands in --ssl-certfile"),
    )
    ssl_keyfile_password: Text | None = setting(
        None,
        "HTTP",
        "PASSWORD",
        "What --ssl-keyfile is encrypted with.",
        ("none", "it is not encrypted"),
        repr=False,
    )
    ssl_ca_certs: Text | None = setting(
        None,
        "HTTP",
        "FILE",
        "Authorities, in PEM: each client must show a certificate that one of them has signed.",
        ("none", "clients need no certificate"),
    )
    root_path: RootPath = setting(
        "",
        "HTTP",
        "PATH",
        "The path under which a reverse proxy shows this server, such as /llm. Requests may come with it or without.",
    )
    sse_keep_alive_interval: float = setting(
        15.0, "HTTP", "SECONDS", "A stream that has been silent this long gets a comment line. 0: never.", ge=0
    )
    shutdown_timeout: float = setting(
        30.0, "HTTP", "SECONDS", "How long open requests may go on after SIGTERM. 0: they are aborted at once.", ge=0
    )

    # ---------------------------------------------------------------- metrics and log
    protect_metrics: bool = setting(False, "Metrics and log", "", "Ask for the API key at /metrics too.")
    metrics_compat: Literal["vllm", "none"] = setting(
        "vllm",
        "Metrics and log",
        "",
        "vllm: /metrics has vLLM's names beside octavo_*, for existing dashboards and gateways. none: octavo_* alone.",
    )
    log_level: LogLevel = setting("info", "Metrics and log", "", "The least important messages that are logged.")
    log_format: Literal["auto", "text", "json"] = setting(
        "auto",
        "Metrics and log",
        "",
        "How messages are written. text: a line of words; json: a JSON object a line.",
        ("auto", "text on a terminal, json elsewhere"),
    )

    # ---------------------------------------------------------------- machine
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Machine",
        "",
        "What computes. cuda: the first GPU that CUDA_VISIBLE_DEVICES leaves visible.",
        ("auto", "a GPU where there is one, else the CPU"),
    )
    attention_backend: Literal["auto", "triton", "flash-attn", "cpu", "reference"] = setting(
        "auto",
        "Machine",
        "",
        "Whose kernels compute attention. triton: a GPU's. flash-attn: that library where it is installed, on a GPU. "
        "cpu: C++, on a CPU. reference: plain torch, slow.",
        ("auto", "cpu on a CPU, triton on a GPU, reference where they cannot serve"),
    )
    enforce_eager: bool = setting(
        False,
        "Machine",
        "",
        "On a GPU, launch every step kernel by kernel: no CUDA graphs, which cost time at start and memory and make "
        "generation faster.",
    )
    batch_invariant: bool = setting(
        False,
        "Machine",
        "",
        "On a GPU, compute linear layers by kernels that add in the same order whatever else is in a step, so that "
        "other requests change no answer, not even in its last bits; it costs some speed. On a CPU they never do, and "
        "the flag changes nothing.",
    )
    num_threads: int | None = setting(
        None,
        "Machine",
        "N",
        "Threads that compute; on a GPU those that sample.",
        ("auto", "one for each physical core that Octavo may use"),
        ge=1,
        le=4096,
    )
    watchdog_timeout: float | None = setting(
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
        words = (*NOTHING, extra(field, "word")) if type(None) in get_args(field.annotation) else ()
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
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
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

    def step_tokens(self, is_gpu: bool) -> int:
        """Tokens of the largest step."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, GPU_STEP_TOKENS if is_gpu else STEP_TOKENS)

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
        if word and value in (None, (), word):
            return word, extra(field, "meaning")
        return value, ""


def flag(name: str) -> str:
    """'max_model_len' → '--max-model-len'"""
    return "--" + name.replace("_", "-")


def extra(field: FieldInfo, key: Literal["group", "metavar", "word", "meaning"]) -> str:
    """What `setting` noted about a field."""
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
