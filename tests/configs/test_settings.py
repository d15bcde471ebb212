"""The declaration itself: help, limits, sizes, errors in one sentence."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.errors import OctavoError, SettingsError, StartupError
from configs.setting_types import parse_size, write_size
from configs.settings import SECRET_FIELDS, Settings, did_you_mean, extra, flag


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_field_is_documented(name: str):
    info = Settings.model_fields[name]
    assert info.description and len(info.description) >= 20 and info.description.rstrip().endswith(".")
    assert extra(info, "group")
    assert name == name.lower() and "-" not in name


def test_secrets_are_fields():
    assert set(Settings.model_fields) >= SECRET_FIELDS


def test_defaults_are_valid_and_keep_their_types():
    settings = Settings()
    assert Settings.create(settings.model_dump()) == settings
    assert settings.model is None and settings.max_model_len is None and settings.port == 8000
    assert settings.max_num_queued_reqs and settings.max_num_queued_tokens and settings.queue_timeout  # bounded


def test_json_round_trip():
    """Settings travel to the engine process as JSON values."""
    settings = Settings(served_model_name=("a", "b"), max_model_len="4k", queue_timeout=None, api_key="k")
    assert Settings(**json.loads(json.dumps(settings.model_dump(mode="json")))) == settings


def test_frozen():
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.port = 1
    assert hash(settings) == hash(Settings())  # all the way down: lists became tuples


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("32K", 32768),
        ("2M", 2 * 1024**2),
        ("2m", 2_000_000),
        ("25.6k", 25_600),
        ("2.5GiB", 5 * 1024**3 // 2),
        ("4GiB", 4 * 1024**3),
        ("4 gib", 4 * 1024**3),
        ("4G", 4 * 1024**3),
        ("4GB", 4 * 10**9),
        ("4gb", 4 * 10**9),
        ("1Ti", 1024**4),
        ("512b", 512),
        (" 7 ", 7),
        ("0.3K", 307),  # 307.2
        ("1.1k", 1100),  # exact: no binary fraction in between
    ],
)
def test_sizes(text: str, expected: int):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "1.5", "1,5G", "4 parsecs", "4e9", "0x10", "1K2", "1.K", "١k", "infG", "9" * 5000]
)
def test_what_is_no_size(text: str):
    with pytest.raises(ValueError):
        parse_size(text)


@given(
    number=st.integers(0, 10**9),
    thousandths=st.integers(0, 999),
    suffix=st.sampled_from("kmgtKMGT"),
    unit=st.sampled_from(["", "B", "b", "i", "iB", "ib"]),
)
def test_sizes_by_the_rule(number: int, thousandths: int, suffix: str, unit: str):
    base = 1024 if unit.startswith("i") or (suffix.isupper() and not unit) else 1000
    whole = (number * 1000 + thousandths) * base ** ("kmgt".index(suffix.lower()) + 1) // 1000
    assert parse_size(f"{number}.{thousandths:03d}{suffix}{unit}") == whole


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**31, "2 GiB"), (2**52, "4096 TiB")]
)
def test_sizes_as_people_read_them(size: int, words: str):
    assert write_size(size) == words


@given(st.text(max_size=12))
def test_size_parser_answers_or_raises_value_error(text: str):
    with contextlib.suppress(ValueError):
        assert parse_size(text) >= 0


@given(st.integers(0, 2**63))
def test_plain_numbers_are_themselves(number: int):
    assert parse_size(str(number)) == number


# ---------------------------------------------------------------- words for None
@pytest.mark.parametrize("value", ["auto", "AUTO", "-1", -1, None, "none"])
def test_window_of_the_model(value: object):
    assert Settings(max_model_len=value).max_model_len is None


CHOSEN = (
    "model",
    "chat_template",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "host",
)
LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens", "queue_timeout", "watchdog_timeout")


@pytest.mark.parametrize("name", [*CHOSEN, "num_threads"])
def test_auto(name: str):
    assert getattr(Settings(**{name: "Auto"}), name) is None


@pytest.mark.parametrize("name", LIMITS)
def test_octavo_chooses_no_limit(name: str):
    with pytest.raises(SettingsError, match=f"{flag(name)}.*'auto'"):
        Settings.create({name: "auto"})


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", ["none", "None", "null", None])
def test_none_takes_a_limit_away(name: str, value: object):
    assert getattr(Settings(**{name: value}), name) is None


def test_none_is_no_value_where_one_is_needed():
    for name in ("port", "max_num_seqs", "shutdown_timeout", "enable_prefix_caching", "dtype"):
        with pytest.raises(SettingsError, match=flag(name)):
            Settings.create({name: None})
        with pytest.raises(SettingsError, match=flag(name)):
            Settings.create({name: "none"})
    assert Settings(metrics_compat="none").metrics_compat == "none"


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"port": "70000"}, ["--port", "70000", "65535"]),
        ({"port": "http"}, ["--port", "http", "integer"]),
        ({"port": 80.5}, ["--port", "80.5", "integer"]),
        ({"port": True}, ["--port", "true or false"]),
        ({"dtype": "half"}, ["--dtype", "half", "'bfloat16'"]),
        ({"quantization": "awq"}, ["--quantization", "awq", "'none' or 'int8'"]),
        ({"max_model_len": "1"}, ["--max-model-len", "'1'", "2"]),
        ({"max_model_len": "long"}, ["--max-model-len", "'long'", "32K"]),
        ({"kv_cache_memory_bytes": "4 parsecs"}, ["--kv-cache-memory-bytes", "parsecs", "2.5GiB"]),
        ({"kv_cache_memory_bytes": 0}, ["--kv-cache-memory-bytes", "0"]),
        ({"num_gpu_blocks_override": "0"}, ["--num-gpu-blocks-override", "'0'", "1"]),
        ({"gpu_memory_utilization": "1.5"}, ["--gpu-memory-utilization", "1.5"]),
        ({"gpu_memory_utilization": "0"}, ["--gpu-memory-utilization", "'0'"]),
        ({"gpu_memory_utilization": "nan"}, ["--gpu-memory-utilization", "nan"]),
        ({"shutdown_timeout": "inf"}, ["--shutdown-timeout", "inf"]),
        ({"queue_timeout": 0}, ["--queue-timeout", "0"]),
        ({"block_size": 24}, ["--block-size", "24", "power of two"]),
        ({"block_size": 2}, ["--block-size", "2", "4"]),
        ({"block_size": 512}, ["--block-size", "512", "256"]),
        ({"attention_backend": "flashinfer"}, ["--attention-backend", "flashinfer", "'flash-attn'"]),
        ({"enable_prefix_caching": "perhaps"}, ["--enable-prefix-caching", "perhaps"]),
        ({"model": ""}, ["--model", "empty"]),
        ({"model": 7}, ["--model", "7", "string"]),
        ({"served_model_name": ["a", " "]}, ["--served-model-name", "empty"]),
        ({"served_model_name": {"a": 1}}, ["--served-model-name"]),
        ({"log_level": "loud"}, ["--log-level", "loud", "'debug'"]),
        ({"max_num_seqs": 600, "max_num_batched_tokens": 512}, ["--max-num-batched-tokens", "600", "512"]),
        ({"max_modle_len": 5}, ["max_modle_len", "max_model_len"]),
        ({"zzz": 5}, ["zzz"]),
    ],
)
def test_errors_name_flag_value_and_limit(values: dict[str, object], parts: list[str]):
    with pytest.raises(SettingsError) as caught:
        Settings.create(values)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message and message[-1] in ".?" and "pydantic" not in message


def test_errors_say_where_the_value_came_from():
    with pytest.raises(SettingsError, match=r"from OCTAVO_PORT"):
        Settings.create({"port": "x"}, {"port": "OCTAVO_PORT"})
    with pytest.raises(SettingsError) as caught:
        Settings.create({"port": "x"}, {"port": "--port"})
    assert "from" not in str(caught.value)


def test_settings_errors_are_start_up_errors():
    assert issubclass(SettingsError, StartupError) and issubclass(StartupError, OctavoError)


@pytest.mark.parametrize("key", ["", "two words", "kéy", "tab\t", "new\nline"])
def test_api_keys_that_cannot_be_sent(key: str):
    with pytest.raises(SettingsError) as caught:
        Settings.create({"api_key": ["good-key", key]})
    assert "--api-key" in str(caught.value) and (not key or key not in str(caught.value))


def test_secrets_are_never_shown():
    for name in SECRET_FIELDS:
        settings = Settings(**{name: "sk-secret"})
        assert "sk-secret" not in repr(settings) and "sk-secret" not in str(settings)
    with pytest.raises(ValidationError) as caught:
        Settings(api_key=("sk-sécret",))
    assert "sécret" not in str(caught.value)


def test_the_admin_key_is_no_api_key():
    with pytest.raises(SettingsError) as caught:
        Settings.create({"api_key": ["a", "same"], "admin_api_key": "same"})
    assert str(caught.value).startswith("--admin-api-key must differ") and "same" not in str(caught.value)


def test_did_you_mean():
    assert "max_num_seqs" in did_you_mean("max_num_sqs", Settings.model_fields)
    assert did_you_mean("zzzz", Settings.model_fields) == "."


# ---------------------------------------------------------------- host
def test_closed_to_the_network_by_default():
    assert Settings().bind_host == "127.0.0.1"
    assert Settings(api_key="k").bind_host == "0.0.0.0"
    assert Settings(host="::1", api_key="k").bind_host == "::1"
    assert Settings(host="0.0.0.0").bind_host == "0.0.0.0"


def test_a_step_is_larger_on_a_gpu_and_has_room_for_every_sequence() -> None:
    """Unless it is given."""
    assert [Settings().step_tokens(is_gpu) for is_gpu in (False, True)] == [512, 2048]
    assert [Settings(max_num_seqs=600).step_tokens(is_gpu) for is_gpu in (False, True)] == [600, 2048]
    assert [Settings(max_num_batched_tokens=256).step_tokens(is_gpu) for is_gpu in (False, True)] == [256, 256]
