"""Four sources, their order, and what is said about a mistake in each."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import SettingsError
from configs.load import Loaded, load, make_parser
from configs.settings import SECRET_FIELDS, Settings, flag

SAMPLES: dict[str, tuple[str, object]] = {
    "model": ("org/some_model", "org/some_model"),
    "served_model_name": ("small", ("small",)),
    "revision": ("refs/pr/1", "refs/pr/1"),
    "tokenizer": ("org/other", "org/other"),
    "trust_remote_code": ("true", True),
    "dtype": ("float32", "float32"),
    "quantization": ("int8", "int8"),
    "max_model_len": ("32K", 32768),
    "chat_template": ("file_of_mine.jinja", "file_of_mine.jinja"),
    "block_size": ("32", 32),
    "gpu_memory_utilization": ("0.25", 0.25),
    "kv_cache_memory_bytes": ("2.5GiB", 2684354560),
    "num_gpu_blocks_override": ("77", 77),
    "enable_prefix_caching": ("false", False),
    "kv_cache_dtype": ("FP8_E5M2", "fp8_e5m2"),
    "kv_cache_dtype_v": ("bfloat16", "bf16"),
    "kv_cache_dtype_skip_layers": ("sliding_window", ("sliding_window",)),
    "kv_cache_scales": ("my_scales.safetensors", "my_scales.safetensors"),
    "kv_refresh_interval": ("1k", 1000),
    "cache_sharing": ("global", "global"),
    "max_num_seqs": ("9", 9),
    "max_num_batched_tokens": ("2k", 2000),
    "scheduling_policy": ("priority", "priority"),
    "max_num_queued_reqs": ("none", None),
    "max_num_queued_tokens": ("1M", 1048576),
    "queue_timeout": ("2.5", 2.5),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9001", 9001),
    "api_key": ("key_1", ("key_1",)),
    "admin_api_key": ("key_0", "key_0"),
    "ssl_certfile": ("a_cert.pem", "a_cert.pem"),
    "ssl_keyfile": ("a_key.pem", "a_key.pem"),
    "ssl_keyfile_password": ("pass_word", "pass_word"),
    "ssl_ca_certs": ("ca.pem", "ca.pem"),
    "root_path": ("/llm_1", "/llm_1"),
    "sse_keep_alive_interval": ("0", 0.0),
    "shutdown_timeout": ("1", 1.0),
    "protect_metrics": ("true", True),
    "metrics_compat": ("none", "none"),
    "log_level": ("WARNING", "warning"),
    "log_format": ("json", "json"),
    "device": ("cpu", "cpu"),
    "attention_backend": ("flash-attn", "flash-attn"),
    "enforce_eager": ("true", True),
    "batch_invariant": ("true", True),
    "num_threads": ("3", 3),
    "watchdog_timeout": ("60", 60.0),
}
EVERY_FIELD = pytest.mark.parametrize("name", Settings.model_fields)
UNDERSCORES = pytest.mark.parametrize("underscores", [False, True], ids=["dashes", "underscores"])


def spelt(name: str, underscores: bool) -> str:
    return name if underscores else name.replace("_", "-")


def as_flags(name: str, text: str, underscores: bool = False) -> list[str]:
    key = spelt(name, underscores)
    if isinstance(Settings.model_fields[name].default, bool):
        return ["--" + key] if text == "true" else ["--" + spelt(f"no_{name}", underscores)]
    return ["--" + key, text]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def check(loaded: Loaded, name: str, expected: object, origin: str) -> None:
    assert getattr(loaded.settings, name) == expected
    assert loaded.origins[name] == origin
    others = set(Settings.model_fields) - {name}
    assert all(getattr(loaded.settings, other) == getattr(Settings(), other) for other in others)
    assert {loaded.origins[other] for other in others} == {"default"}


def refusal(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load(argv, environ or {})
    message = str(caught.value)
    assert "\n" not in message and message[-1] in ".?"
    return message


# ---------------------------------------------------------------- each field, each source
def test_samples_cover_every_field():
    assert set(SAMPLES) == set(Settings.model_fields)
    assert all(expected != getattr(Settings(), name) for name, (_, expected) in SAMPLES.items())


@EVERY_FIELD
@UNDERSCORES
def test_every_field_by_flag(name: str, underscores: bool):
    text, expected = SAMPLES[name]
    check(load(as_flags(name, text, underscores), {}), name, expected, flag(name))


@EVERY_FIELD
def test_every_field_by_flag_with_equals_sign(name: str):
    text, expected = SAMPLES[name]
    if not isinstance(expected, bool):
        check(load([f"--{name}={text}"], {}), name, expected, flag(name))


@EVERY_FIELD
def test_every_field_by_variable(name: str):
    text, expected = SAMPLES[name]
    variable = "OCTAVO_" + name.upper()
    check(load([], {variable: text}), name, expected, variable)


@EVERY_FIELD
@UNDERSCORES
def test_every_field_by_yaml(name: str, underscores: bool, tmp_path: Path):
    text, expected = SAMPLES[name]
    path = write(tmp_path / "octavo.yaml", f"{spelt(name, underscores)}: {text}\n")
    check(load(["--config", path], {}), name, expected, path)


@EVERY_FIELD
def test_flag_over_variable_over_yaml_over_default(name: str, tmp_path: Path):
    """Adds one source after the other; each takes over from the one below."""
    text, expected = SAMPLES[name]
    other = {True: "false", False: "true"}.get(expected) if isinstance(expected, bool) else None
    path = write(tmp_path / "octavo.yaml", f"{name}: {text}\n")
    variable = "OCTAVO_" + name.upper()
    lower = load(["--config", path], {})
    assert lower.origins[name] == path
    middle = load(["--config", path], {variable: other or text})
    assert middle.origins[name] == variable
    top = load(["--config", path, *as_flags(name, text)], {variable: other or text})
    assert top.origins[name] == flag(name) and getattr(top.settings, name) == expected


def test_precedence_by_value(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "port: 1\nmax-num-seqs: 1\ndtype: float32\n")
    loaded = load(["--config", path, "--port", "3"], {"OCTAVO_PORT": "2", "OCTAVO_MAX_NUM_SEQS": "2"})
    assert (loaded.settings.port, loaded.settings.max_num_seqs, loaded.settings.dtype) == (3, 2, "float32")
    assert loaded.settings.block_size == Settings().block_size


def test_a_bad_value_that_is_overruled_does_no_harm():
    assert load(["--port", "1"], {"OCTAVO_PORT": "nonsense"}).settings.port == 1


# ---------------------------------------------------------------- MODEL
@pytest.mark.parametrize(
    "argv", [["m", "--port", "1"], ["--port", "1", "m"], ["--port=1", "--", "m"], ["--model", "m"]]
)
def test_model_first_last_or_by_flag(argv: list[str]):
    assert load(argv, {}).settings.model == "m"


def test_model_argument_overrules_the_other_sources(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "model: from-file\n")
    loaded = load(["m", "--config", path], {"OCTAVO_MODEL": "from-variable"})
    assert loaded.settings.model == "m" and loaded.origins["model"] == "MODEL"


def test_two_models():
    assert "'a'" in refusal(["a", "b"])
    assert "--model" in refusal(["a", "--model", "b"])
    assert load(["a", "--model", "a"], {}).settings.model == "a"


def test_a_list_does_not_swallow_the_model():
    """Otherwise the default model would be served, with the model's name as a valid key."""
    assert "put MODEL first" in refusal(["--api-key", "KEY", "org/model"])
    loaded = load(["org/model", "--api-key", "KEY", "KEY2"], {})
    assert loaded.settings.model == "org/model" and loaded.settings.api_key == ("KEY", "KEY2")


# ---------------------------------------------------------------- lists
@pytest.mark.parametrize(
    "argv", [["--api-key", "a", "--api-key", "b"], ["m", "--api-key", "a", "b"], ["m", "--api_key=a", "--api-key", "b"]]
)
def test_lists_by_flag(argv: list[str]):
    assert load(argv, {}).settings.api_key == ("a", "b")


@pytest.mark.parametrize("text", ["a,b", " a , b ", '["a", "b"]', ' ["a","b"]'])
def test_lists_by_variable(text: str):
    assert load([], {"OCTAVO_API_KEY": text}).settings.api_key == ("a", "b")


@pytest.mark.parametrize("text", ["[a, b]", "\n  - a\n  - b", '["a", "b"]'])
def test_lists_by_yaml(text: str, tmp_path: Path):
    path = write(tmp_path / "c.yaml", f"api-key: {text}\n")
    assert load(["--config", path], {}).settings.api_key == ("a", "b")


def test_a_comma_is_a_comma_in_a_flag():
    assert load(["--served-model-name", "a,b"], {}).settings.served_model_name == ("a,b",)


def test_broken_lists():
    assert "OCTAVO_API_KEY" in refusal([], {"OCTAVO_API_KEY": '["a"'})
    assert "--served-model-name" in refusal([], {"OCTAVO_SERVED_MODEL_NAME": "[1]"})
    assert "empty" in refusal([], {"OCTAVO_API_KEY": "a,,b"})


def test_sources_replace_lists_and_do_not_add_to_them():
    assert load(["--api-key", "new"], {"OCTAVO_API_KEY": "old"}).settings.api_key == ("new",)


# ---------------------------------------------------------------- what is not known
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--prot", "--port"),
        ("--max_modle_len", "--max-model-len"),
        ("--enable-prefix-cacheing", "--enable-prefix-caching"),
        ("--no-enable-prefix-cache", "--no-enable-prefix-caching"),
        ("-port", "--port"),
        ("--confg", "--config"),
        ("--print-confg", "--print-config"),
    ],
)
@pytest.mark.parametrize("value", [[], ["7"]])
def test_unknown_flag(wrong: str, right: str, value: list[str]):
    assert f"{right!r}" in refusal([wrong, *value])
    assert f"{right!r}" in refusal(["model", wrong, *value, "--port", "1"])


def test_unknown_flag_far_from_all():
    message = refusal(["--zzzz"])
    assert "--zzzz" in message and "did you mean" not in message


def test_flags_are_not_abbreviated():
    assert "--max-num" in refusal(["--max-num", "3"])


def test_unknown_variable():
    assert "'OCTAVO_MAX_NUM_SEQS'" in refusal([], {"OCTAVO_MAX_NUM_SEQ": "1"})
    assert "OCTAVO_ZZZZ" in refusal([], {"OCTAVO_ZZZZ": ""})


def test_other_programs_variables_are_left_alone():
    assert load([], {"VLLM_PORT": "1", "PORT": "2", "octavo_port": "3"}).settings == Settings()


def test_kubernetes_service_links_are_left_alone():
    """A service named 'octavo' puts these into every pod of its namespace."""
    links = {
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_SERVICE_PORT": "8000",
        "OCTAVO_SERVICE_PORT_HTTP": "8000",
        "OCTAVO_PORT": "tcp://10.0.0.1:8000",
        "OCTAVO_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "OCTAVO_PORT_8000_TCP_PROTO": "tcp",
        "OCTAVO_PORT_8000_TCP_PORT": "8000",
        "OCTAVO_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load([], links).settings == Settings()
    assert load([], {"OCTAVO_PORT": "8001"}).settings.port == 8001


def test_an_empty_variable_counts_as_not_set(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "api-key: [k]\nport: 7\n")
    loaded = load(["--config", path], {"OCTAVO_API_KEY": "", "OCTAVO_PORT": "", "OCTAVO_CONFIG": ""})
    assert loaded.settings.api_key == ("k",) and loaded.settings.port == 7 and loaded.origins["port"] == path


def test_an_empty_flag_is_an_error():
    assert "--api-key" in refusal(["m", "--api-key", ""])
    assert "--port" in refusal(["--port", ""])


def test_flag_without_its_value():
    assert "--port" in refusal(["--port"])
    assert "--enable-prefix-caching" in refusal(["--enable-prefix-caching=maybe"])


def test_a_value_from_a_file_is_blamed_on_the_file(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "port: 99999\n")
    assert path in refusal(["--config", path])
    assert "OCTAVO_PORT" in refusal([], {"OCTAVO_PORT": "99999"})


# ---------------------------------------------------------------- YAML
@UNDERSCORES
def test_unknown_key(underscores: bool, tmp_path: Path):
    path = write(tmp_path / "c.yaml", f"{spelt('max_modle_len', underscores)}: 5\n")
    message = refusal(["--config", path])
    assert "'max-model-len'" in message and path in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("port: 1\nport: 2\n", "twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "twice"),
        ("- port\n", "name: value"),
        ("just words\n", "name: value"),
        ("port: [1\n", "line"),
        ("port: {a: 1}\n", "--port"),
        ("port: on\n", "true or false"),
        ("model: 7\n", "--model"),
        ("model: 2001-99-99\n", "YAML"),
        ("config: other.yaml\n", "'config'"),
        ("port:\n", "--port"),
        ("a: \x00\n", "YAML"),
        ("port: !!python/object/apply:os.getcwd []\n", "YAML"),
        ("base: &b {port: 1}\n<<: *b\n", "'base'"),
    ],
)
def test_broken_files(text: str, part: str, tmp_path: Path):
    assert part in refusal(["--config", write(tmp_path / "c.yaml", text)])


def test_file_that_is_not_there(tmp_path: Path):
    assert "No such file" in refusal(["--config", str(tmp_path / "no.yaml")])
    assert "directory" in refusal(["--config", str(tmp_path)])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    assert "UTF-8" in refusal(["--config", str(tmp_path / "binary.yaml")])


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_empty_file(text: str, tmp_path: Path):
    assert load(["--config", write(tmp_path / "c.yaml", text)], {}).settings == Settings()


def test_none_in_a_file(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "queue-timeout: null\nmax-num-queued-reqs: none\nmax-model-len: -1\n")
    loaded = load(["--config", path], {})
    assert loaded.settings.queue_timeout is None and loaded.settings.max_num_queued_reqs is None


def test_octavo_config_names_the_file(tmp_path: Path):
    first, second = write(tmp_path / "1.yaml", "port: 1\n"), write(tmp_path / "2.yaml", "port: 2\n")
    assert load([], {"OCTAVO_CONFIG": first}).settings.port == 1
    assert load(["--config", second], {"OCTAVO_CONFIG": first}).settings.port == 2


# ---------------------------------------------------------------- the real environment
def test_reads_the_real_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OCTAVO_PORT", "4711")
    assert load([]).settings.port == 4711


# ---------------------------------------------------------------- --print-config
def test_print_config_shows_value_and_origin(tmp_path: Path):
    path = write(tmp_path / "c.yaml", "block-size: 32\n")
    loaded = load(["my_model", "--config", path, "--port", "9", "--print-config"], {"OCTAVO_MAX_MODEL_LEN": "4K"})
    assert loaded.print_config
    lines = loaded.describe().splitlines()
    assert f"block-size: 32  # {path}" in lines
    assert "port: 9  # --port" in lines
    assert "max-model-len: 4096  # OCTAVO_MAX_MODEL_LEN" in lines
    assert 'model: "my_model"  # MODEL' in lines
    assert "enable-prefix-caching: true  # default" in lines
    assert len(lines) == 1 + len(Settings.model_fields)


def test_print_config_says_what_an_unset_field_comes_to():
    lines = load([], {}).describe().splitlines()
    assert "null" not in "".join(lines)
    assert 'host: "auto"  # default: 127.0.0.1' in lines
    assert 'num-threads: "auto"  # default: one for each physical core that Octavo may use' in lines
    assert 'model: "auto"  # default: SmolLM2-135M-Instruct' in lines
    lines = load(["--queue-timeout", "none", "--host=auto"], {"OCTAVO_API_KEY": "k"}).describe().splitlines()
    assert 'queue-timeout: "none"  # --queue-timeout: no limit' in lines
    assert 'host: "auto"  # --host: 0.0.0.0, since an API key is set' in lines


OPTIONAL = [name for name, info in Settings.model_fields.items() if type(None) in get_args(info.annotation)]


@pytest.mark.parametrize("name", OPTIONAL)
def test_print_config_shows_no_value_as_a_word_that_can_be_read_back(name: str, tmp_path: Path):
    printed = load([f"{flag(name)}=none"], {}).describe()
    assert getattr(load(["--config", write(tmp_path / "c.yaml", printed)], {}).settings, name) is None
    [line] = [line for line in printed.splitlines() if line.startswith(f"{flag(name)[2:]}:")]
    assert re.fullmatch(rf'[a-z-]+: "(auto|none)"  # {flag(name)}: \S.*', line), line


@pytest.mark.parametrize("name", sorted(SECRET_FIELDS))
def test_print_config_hides_keys(name: str):
    text = load([flag(name), "sk-secret"], {}).describe()
    assert "sk-secret" not in text and f"{flag(name)[2:]}: 1 not shown  # {flag(name)}" in text
    assert "not shown" not in load([], {}).describe()


@EVERY_FIELD
def test_print_config_can_be_read_back(name: str, tmp_path: Path):
    if name in SECRET_FIELDS:  # left out on purpose
        return
    text, expected = SAMPLES[name]
    printed = load(as_flags(name, text), {}).describe()
    assert yaml.safe_load(printed).keys() == {flag(each)[2:] for each in Settings.model_fields}
    again = load(["--config", write(tmp_path / "c.yaml", printed)], {})
    assert getattr(again.settings, name) == expected


# ---------------------------------------------------------------- --help, --version
def test_help_is_grouped_and_shows_every_flag():
    text = make_parser().format_help()
    assert text.startswith("usage: octavo serve [MODEL] [flags]")
    for name, info in Settings.model_fields.items():
        assert flag(name) in text
        assert str(info.description).split(":")[0].split()[0] in text
    for title in ("Model:", "KV cache:", "Scheduling:", "Queue:", "HTTP:"):
        assert f"\n{title}\n" in text
    assert "{auto,bfloat16,float16,float32}" in text and "(default: 8000)" in text and "OCTAVO_MAX_MODEL_LEN" in text


@pytest.mark.parametrize("argument", ["--help", "-h", "--version"])
def test_help_and_version_end_well(argument: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        load([argument], {})
    assert end.value.code == 0 and "octavo" in capsys.readouterr().out


# ---------------------------------------------------------------- anything at all
WORDS = st.one_of(
    st.sampled_from([flag(name) for name in Settings.model_fields]),
    st.sampled_from(
        ["--", "-", "--no-enable-prefix-caching", "--config", "--api-key=", "--port=-1", "32K", "none", "m"]
    ),
    st.text(max_size=8),
)


@given(argv=st.lists(WORDS, max_size=6), port=st.text(max_size=5), keys=st.text(max_size=9))
@settings(max_examples=150, deadline=None)
def test_any_input_gives_settings_or_one_sentence(argv: list[str], port: str, keys: str):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            loaded = load(argv, {"OCTAVO_PORT": port, "OCTAVO_API_KEY": keys})
    except SettingsError as error:
        assert str(error).strip()
    except SystemExit as end:
        assert end.code == 0 and any(word in ("-h", "--help", "--version") or word.startswith("-h") for word in argv)
    else:
        assert set(loaded.origins) == set(Settings.model_fields)
        json.dumps(loaded.settings.model_dump(mode="json"))
