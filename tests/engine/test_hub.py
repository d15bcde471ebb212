"""The Hub: the real client over real HTTP, against a Hub on this machine. Nothing here reaches the Hub itself."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import OTHER_COMMIT, TOKEN, FakeHub, Repository

from engine.errors import StartupError
from engine.hub import NotFetched, Wanted, _all_shards, _human, _needed, _words

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CONFIG = json.dumps(LLAMA).encode()
FILES = {
    "config.json": CONFIG,
    "model.safetensors": b"w" * 3_000_000,
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"x",
}
OTHERS = {
    "pytorch_model.bin": b"no",
    "onnx/model.safetensors": b"no",
    "consolidated.safetensors": b"no",
    "model.fp16.safetensors": b"no",
    "training_args.json": b"no",
    "modeling.py": b"no",
    "README.md": b"no",
}
SHARDS = {f"model-{n:05}-of-00002.safetensors": b"%d" % n for n in (1, 2)}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()}
SHARDED = {**{name: data for name, data in FILES.items() if name != "model.safetensors"}, **SHARDS, **INDEX}

UNREACHABLE = "http://127.0.0.1:9"
WORKER = """
import json, os, sys
from configs.errors import StartupError
from configs.settings import Settings
from engine.source import resolve
from huggingface_hub import constants

def answer(home, token, settings):
    constants.HF_HUB_CACHE = home + "/hub"
    os.environ["HF_TOKEN"] = token
    seen = []
    def progress(phase, done):
        if not seen or seen[-1][0] != phase: seen.append((phase, []))
        seen[-1][1].append(done)
    try:
        source = resolve(Settings.create(settings), progress=progress)
    except StartupError as error:
        return {"said": str(error)}
    found = {"path": source.path, "tokenizer": source.tokenizer, "name": source.name, "origin": source.origin}
    return {**{name: value and str(value) for name, value in found.items()}, "seen": seen}

for line in sys.stdin:
    print(json.dumps(answer(*json.loads(line))), flush=True)
    assert "torch" not in sys.modules
"""


class Worker:
    """A process with one environment, since the client reads that once."""

    def __init__(self, endpoint: str, log: Path, **environ: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "OCTAVO_"))}
        environment = {**inherited, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(log.parent)}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER],
                env=environment | environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, *question: object) -> tuple[dict[str, Any], str]:
        """The answer, and what was logged meanwhile."""
        assert self.process.stdin is not None and self.process.stdout is not None
        before = len(self.log.read_text())
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        logged = self.log.read_text()[before:]
        assert line, logged
        return json.loads(line), logged

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def running() -> Iterator[FakeHub]:
    with FakeHub({}).running() as hub:
        yield hub


@pytest.fixture(scope="module")
def workers(running: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    folder = tmp_path_factory.mktemp("workers")
    workers = {
        "online": Worker(running.endpoint, folder / "online"),
        "offline": Worker(running.endpoint, folder / "offline", HF_HUB_OFFLINE="1"),
        "unreachable": Worker(UNREACHABLE, folder / "unreachable"),
    }
    yield workers
    for worker in workers.values():
        worker.close()


@pytest.fixture
def hub(running: FakeHub) -> FakeHub:
    running.repositories = {"some/model": Repository({**FILES, **OTHERS}, {"main": "c" * 40, "v1": OTHER_COMMIT})}
    running.status = None
    running.seen.clear()
    return running


class Machine:
    """Has a cache of its own."""

    def __init__(self, home: Path, workers: dict[str, Worker]) -> None:
        self.home, self.workers = home, workers
        self.errors = ""
        self.network = "online"
        self.token = ""

    def resolve(self, model: str, **settings: object) -> dict[str, Any]:
        answer, self.errors = self.workers[self.network].ask(str(self.home), self.token, {"model": model, **settings})
        return answer

    def refusal(self, model: str, **settings: object) -> str:
        said = str(self.resolve(model, **settings)["said"])
        assert said.endswith(".") and "\n" not in said and ".." not in said, said
        return said


@pytest.fixture
def machine(tmp_path: Path, hub: FakeHub, workers: dict[str, Worker]) -> Machine:
    return Machine(tmp_path, workers)


BEGIN = "--model: some/model is no local path, and the Hub did not give it: "


# ------------------------------------------------------------------ what is fetched
def test_only_what_is_read(hub: FakeHub, machine: Machine) -> None:
    answer = machine.resolve("some/model")
    assert (answer["name"], answer["origin"]) == ("some/model", "Hugging Face Hub")
    assert {file.name: file.read_bytes() for file in Path(answer["path"]).iterdir()} == FILES
    assert hub.fetched() == sorted(FILES)
    hub.seen.clear()
    again = machine.resolve("some/model")
    assert again == {**answer, "origin": "Hugging Face Hub (cached)", "seen": []} and hub.seen == []


def test_progress_is_counted_in_bytes(machine: Machine) -> None:
    seen = machine.resolve("some/model")["seen"]
    assert isinstance(seen, list)
    (small, _), (large, done) = seen
    assert small.startswith("downloading some/model from the Hugging Face Hub (")
    assert large == "downloading some/model from the Hugging Face Hub (3 MB)"
    assert done[0] == 0.0 and done[-1] == 1.0 and done == sorted(done)
    assert "it/s" not in machine.errors and "Fetching" not in machine.errors


def test_shards(hub: FakeHub, machine: Machine) -> None:
    hub.repositories["some/model"].files = {**SHARDED, **OTHERS}
    machine.resolve("some/model")
    assert hub.fetched() == sorted(SHARDED)


def test_a_revision(hub: FakeHub, machine: Machine) -> None:
    path = machine.resolve("some/model", revision="v1")["path"]
    assert path.endswith(OTHER_COMMIT) and all(OTHER_COMMIT in seen[1] for seen in hub.seen)
    assert machine.refusal("some/model", revision="v2") == BEGIN + "it has no revision 'v2' (--revision)."


def test_an_architecture_that_is_not_served_costs_no_weights(hub: FakeHub, machine: Machine) -> None:
    config = json.dumps({**LLAMA, "architectures": ["MambaForCausalLM"]}).encode()
    hub.repositories["some/model"].files = {**FILES, "config.json": config}
    assert "MambaForCausalLM" in machine.refusal("some/model")
    assert "model.safetensors" not in hub.fetched()


def test_a_tokenizer_from_the_hub(hub: FakeHub, machine: Machine) -> None:
    without = {name: data for name, data in FILES.items() if not name.startswith("tokenizer")}
    hub.repositories["some/weights"] = Repository(without)
    assert machine.refusal("some/weights").endswith(
        "it has no tokenizer.json; name a repository or folder that has this model's with --tokenizer."
    )
    answer = machine.resolve("some/weights", tokenizer="some/model")
    tokenizer = Path(answer["tokenizer"])
    assert (tokenizer / "tokenizer.json").is_file() and not (tokenizer / "model.safetensors").exists()
    said = machine.refusal("some/weights", tokenizer="some/weights")
    assert said == "--tokenizer: some/weights is no local path, and the Hub did not give it: it has no tokenizer.json."


# ------------------------------------------------------------------ GGUF
def test_gguf(hub: FakeHub, machine: Machine) -> None:
    hub.repositories["some/gguf"] = Repository({"m-Q4.gguf": b"GGUF4", "mmproj-F16.gguf": b"no", "config.json": b"{}"})
    answer = machine.resolve("some/gguf")
    path = Path(answer["path"])
    assert path.name == "m-Q4.gguf" and path.read_bytes() == b"GGUF4" and hub.fetched() == ["m-Q4.gguf"]
    machine.network = "unreachable"
    assert machine.resolve("some/gguf")["path"] == str(path)


def test_several_gguf_files(hub: FakeHub, machine: Machine) -> None:
    split = {f"m-F16-{n:05}-of-00002.gguf": b"GGUF" for n in (1, 2)}
    hub.repositories["some/gguf"] = Repository({"m-Q4.gguf": b"GGUF4", "m-Q8.gguf": b"GGUF8", **split})
    said = machine.refusal("some/gguf")
    assert "it has several GGUF files; name one of them: " in said and said.endswith("some/gguf:m-Q8.gguf.")
    assert machine.resolve("some/gguf:m-Q8.gguf")["name"] == "some/gguf:m-Q8.gguf"
    assert hub.fetched() == ["m-Q8.gguf"]
    absent = machine.refusal("some/gguf:m-Q5.gguf")
    assert absent.startswith("--model: some/gguf:m-Q5.gguf ") and "it has no file m-Q5.gguf; name one" in absent
    assert "llama-gguf-split --merge" in machine.refusal("some/gguf:m-F16-00001-of-00002.gguf")


# ------------------------------------------------------------------ what holds no model
@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["config.json", "pytorch_model.bin", "tokenizer.json"], "its weights are pickles (pytorch_model.bin), which"),
        (["consolidated.00.pth", "params.json"], "its weights are pickles (consolidated.00.pth), which can run code"),
        (["adapter_config.json", "adapter_model.safetensors", "config.json"], "it holds an adapter, not a whole model"),
        (["model.safetensors"], "it has no config.json"),
        (["README.md"], "it has no *.safetensors weights"),
    ],
)
def test_repositories_without_a_model(files: list[str], words: str, hub: FakeHub, machine: Machine) -> None:
    hub.repositories["some/model"].files = dict.fromkeys(files, b"{}")
    assert machine.refusal("some/model").startswith(BEGIN + words)
    assert hub.fetched() == []


# ------------------------------------------------------------------ who may
def test_gated(hub: FakeHub, machine: Machine) -> None:
    hub.repositories["some/model"].gated = True
    page = f"{hub.endpoint}/some/model"
    said = machine.refusal("some/model")
    assert (
        said == BEGIN + f"access to it must be granted: accept its licence at {page}, then set HF_TOKEN to your token."
    )
    machine.token = "hf_of_somebody_else"
    said = machine.refusal("some/model")
    assert said == BEGIN + f"the account of HF_TOKEN has no access to it: accept its licence at {page}."
    machine.token = TOKEN
    assert machine.resolve("some/model")["origin"] == "Hugging Face Hub"


def test_private_and_absent(hub: FakeHub, machine: Machine) -> None:
    hub.repositories["some/private"] = Repository(FILES, private=True)
    for name in ("some/private", "some/absent"):
        said = machine.refusal(name)
        assert said.endswith("there is no such repository, or it is private or gated and HF_TOKEN is not set.")
    machine.token = TOKEN
    said = machine.refusal("some/absent")
    assert said.endswith("there is no such repository, or the account of HF_TOKEN may not see it.")
    assert machine.resolve("some/private")["name"] == "some/private"
    machine.token = "hf_nonsense"
    said = machine.refusal("some/model")
    assert said == BEGIN + "the Hub does not take the token in HF_TOKEN."
    assert "hf_nonsense" not in said + machine.errors
    assert machine.resolve("some/private")["origin"] == "Hugging Face Hub (cached)", "what is here needs no leave"


# ------------------------------------------------------------------ a bad network
def test_a_broken_connection_is_taken_up_where_it_broke(hub: FakeHub, machine: Machine) -> None:
    """The client writes pieces of 10 MiB."""
    repository, weights = hub.repositories["some/model"], bytes(range(256)) * (22 << 12)
    repository.files = {**FILES, "model.safetensors": weights}
    repository.breaks["model.safetensors"] = [12 << 20, 11 << 20]
    answer = machine.resolve("some/model")
    assert (Path(answer["path"]) / "model.safetensors").read_bytes() == weights
    ranges = [seen[2] for seen in hub.seen if seen[0] == "GET" and seen[1].endswith("model.safetensors")]
    assert ranges == [None, f"bytes={10 << 20}-", f"bytes={20 << 20}-"]
    assert "Trying to resume download" in machine.errors


def test_a_reset_connection(hub: FakeHub, machine: Machine) -> None:
    repository = hub.repositories["some/model"]
    repository.breaks["model.safetensors"], repository.resets = [1_000_000], True
    answer = machine.resolve("some/model")
    assert (Path(answer["path"]) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    got = [path.rpartition("/")[2] for method, path, _ in hub.seen if method == "GET"]
    assert got.count("tokenizer.json") == 1 and got.count("model.safetensors") == 2, "what was complete stays"


def test_a_connection_that_breaks_again_and_again(hub: FakeHub, machine: Machine) -> None:
    repository = hub.repositories["some/model"]
    repository.breaks["model.safetensors"], repository.resets = [1000] * 9, True
    assert "cannot be reached" in machine.refusal("some/model")
    assert len(repository.breaks["model.safetensors"]) == 6


def test_offline(hub: FakeHub, machine: Machine) -> None:
    fetched = machine.resolve("some/model")
    for machine.network in ("offline", "unreachable"):
        hub.seen.clear()
        answer = machine.resolve("some/model")
        assert (answer["path"], answer["origin"]) == (fetched["path"], "Hugging Face Hub (cached)") and not hub.seen
    said = machine.refusal("other/model")
    assert f"the Hub at {UNREACHABLE} cannot be reached (" in said and said.endswith("there is no copy in the cache.")
    machine.network = "offline"
    assert machine.refusal("other/model").endswith("HF_HUB_OFFLINE is set, and there is no copy in the cache.")
    assert "there is no copy of revision 'v1' in the cache." in machine.refusal("some/model", revision="v1")
    assert machine.refusal("some/model", tokenizer="a/b").startswith("--tokenizer: a/b is no local path, and the Hub")


@pytest.mark.parametrize("lost", ["model-00002-of-00002.safetensors", "tokenizer.json", "config.json"])
def test_offline_with_a_part_of_a_model(lost: str, hub: FakeHub, machine: Machine) -> None:
    hub.repositories["some/model"].files = SHARDED
    path = Path(machine.resolve("some/model")["path"])
    (path / lost).unlink()
    machine.network = "offline"
    said = machine.refusal("some/model")
    assert said.startswith(BEGIN + "HF_HUB_OFFLINE is set, and the copy in the cache ") and lost in said


def test_a_hub_in_trouble(hub: FakeHub, machine: Machine) -> None:
    hub.status = 503
    said = machine.refusal("some/model")
    assert said == BEGIN + "the Hub answers with an error (503); try again later, and there is no copy in the cache."


# ------------------------------------------------------------------ the disk
def test_a_disk_that_is_too_small(hub: FakeHub, machine: Machine) -> None:
    hub.repositories["some/model"].claims["model.safetensors"] = 10**18
    said = machine.refusal("some/model")
    assert said.startswith(BEGIN + "it takes 1e+03 PB and " + str(machine.home)) and "HF_HOME" in said
    assert "model.safetensors" not in hub.fetched()


def test_a_cache_that_cannot_be_written(machine: Machine) -> None:
    (machine.home / "hub").write_text("in the way")
    assert str(machine.home / "hub") in machine.refusal("some/model")


def test_a_disk_that_fills_up_meanwhile() -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    assert "is full: make room" in _words(error, Wanted("some/model"))


# ------------------------------------------------------------------ words
def test_names() -> None:
    assert Wanted.parse("a/b") == Wanted("a/b") and Wanted.parse("a") == Wanted("a")
    assert Wanted.parse("a/b:x/c.gguf") == Wanted("a/b", file="x/c.gguf")
    for name in ("", "a/b/c", "a/b:", "a/b:c", "/a", "a b", "a/b:c.bin", "../a"):
        assert Wanted.parse(name) is None, name


def test_many_choices_are_cut_short() -> None:
    names = [f"m-{number}.gguf" for number in range(40)]
    with pytest.raises(NotFetched, match=r"and 24 more$"):
        _needed(names, Wanted("a/b"))


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (999, "999 bytes"), (3_000_000, "3 MB"), (34 * 10**8, "3.4 GB")]
)
def test_sizes(size: int, words: str) -> None:
    assert _human(size) == words


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../x"}}', "[" * 10**5])
def test_a_damaged_index_in_the_cache(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartupError, match=r"^--model: .*model\.safetensors\.index\.json"):
        _all_shards(tmp_path, list(SHARDS))
