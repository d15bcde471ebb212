"""`octavo plan`: from a configuration alone to words, JSON and an exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import published_models
import pytest
import tiny_models
from fake_hub import FakeHub, Repository

from configs.pool import PROCESS_BYTES, TOKEN_BYTES
from server.cli import main
from server.doctor import WIDTH
from server.plan import USAGE

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "Llama-2-7B"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OCTAVO_"):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """With a config.json and nothing else."""
    return str(published_models.write(tmp_path / "llama", LLAMA))


def report(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("octavo: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("octavo: ").rstrip("\n")


# ---------------------------------------------------------------- what is said
def test_a_report_for_people(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "--gpu", "80GiB"]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert max(len(line) for line in text.replace(folder, "model").splitlines()) <= WIDTH
    for part in (
        "LlamaForCausalLM, 6738 million parameters",
        "weights 12.55 GiB in bfloat16",
        "32 MHA: 32 query and 32 KV heads of 128 numbers, K and V bf16: 524,288 bytes a token, 8 MiB a page",
        "a request of 4,096 tokens: 2 GiB (2,147,483,648 bytes)",
        "KV pool 56.73 GiB: by default 0.9 of the GPU's free memory",
        "lengths assumed: log-normal, half at most 1,024 tokens, 95 % at most 4,096",
        "in one piece, 4,096 tokens each 524,288 28 28",
        "in pages, as it is 524,288 113 28",
        "The load is 128 requests of 4,096 tokens at once (--max-num-seqs, p95): 28 fit.",
        "With this change it fits: another model: 4 of 32 KV heads (65,536 bytes a token).",
    ):
        assert part in words, part


def test_windows_formats_and_gpus_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(published_models.write(tmp_path, "Gemma-3-27B"))
    flags = ["--tp", "32", "--gpu", "24GiB", "--kv-cache-dtype", "int8", "--kv-cache-dtype-v", "int4"]
    assert main(["plan", folder, *flags, "--kv-refresh-interval", "64", "--max-model-len", "32K"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "52 GQA that see the last 1,024 tokens: 32 query and 16 KV heads of 128 numbers" in words
    assert "(on each GPU 1 and 1), K and V bf16" in words and "K int8, V int4" in words
    assert (
        "replication KV heads are kept 2 times, since there are fewer of them than GPUs" in words
        and "on each of 32 GPUs" in words
    )
    assert "for one sequence in full precision" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "at once (--max-num-seqs, p95). It takes 301.4 GiB of a GPU's memory, 256 GiB of it KV cache."),
        (("--gpu", "80GiB", "--max-num-seqs", "8"), "it fits, and 28 would; reserved in one piece, 28 would."),
        (("--gpu", "80GiB", "--context", "100"), "of 100 tokens at once (--max-num-seqs, --context): it fits"),
        (("--memory", "64GiB", "--max-num-seqs", "16"), "The memory is there: --kv-cache-memory-bytes 32768MiB gives"),
        (
            ("--memory", "20GiB", "--max-num-seqs", "16"),
            "It takes 44.9 GiB of main memory, 32 GiB of it KV cache. There --kv-cache-memory-bytes 32768MiB is "
            "needed: without a flag the KV cache takes half of what the weights leave, at most 4 GiB. With this change",
        ),
        (
            ("--memory", "20GiB", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "3GiB"),
            "It takes 44.9 GiB of main memory, 32 GiB of it KV cache. With this change",
        ),
        (("--gpu", "32GiB", "--max-num-seqs", "320"), "No single change above makes it fit; --tp 32 does."),
        (
            ("--gpu", "22GiB", "--max-num-seqs", "512"),
            "1 fits. It takes 1.129 TiB of a GPU's memory, 1 TiB of it KV cache. No single change above makes it fit.",
        ),
        (("--gpu", "80GiB", "--context", "1", "--max-num-seqs", "1"), "The load is 1 request of 1 token at once"),
        (
            ("--gpu", "400GiB", "--gpu-memory-utilization", "0.2"),
            "The memory is there: --gpu-memory-utilization 0.68 gives it to the KV cache.",
        ),
        (
            ("--gpu", "100GiB", "--num-gpu-blocks-override", "300", "--max-num-seqs", "32"),
            "1 fits. It takes 79.05 GiB of a GPU's memory, 64 GiB of it KV cache. The memory is there: "
            "--num-gpu-blocks-override 8192 gives it to the KV cache.",
        ),
    ],
)
def test_verdicts(arguments: tuple[str, ...], words: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, *arguments]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_weights_in_int8_with_their_figures(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU with what speaks against them."""
    sizes = "--quantization int8 (6.405 GiB of weights in place of 12.55 GiB)."
    little = ["--kv-cache-memory-bytes", "1GiB", "--max-num-seqs", "1", "--context", "2048"]
    for memory, end in (("--memory=8.5GiB", "the end"), ("--gpu=12GiB", "Steps are slower for it on a GPU.")):
        assert main(["plan", folder, memory, *little]) == 1, "as it is it would not be served"
        words = " ".join(capsys.readouterr().out.split()) + " the end"
        assert f"With this change it fits: {sizes} {end}" in words


def test_a_quantised_format_may_be_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the check at start. The planner says so of one that is given, and of one that it advises."""
    folder = str(published_models.write(tmp_path, "Gemma-3-1B"))
    tried = "octavo serve tries a quantised cache at start, and refuses one that gives nonsense with the model"
    assert main(["plan", folder, "--gpu", "9.5GiB", "--max-num-seqs", "128"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    formats = "--kv-cache-dtype int8 --kv-cache-dtype-v int4 (24,200 bytes a token)"
    assert f"With this change it fits: {formats}. It may be refused: {tried}." in words
    assert f"check {tried}" not in words
    assert main(["plan", folder, "--kv-cache-dtype", "int8"]) == 0
    assert f"check {tried}" in " ".join(capsys.readouterr().out.split())


def test_fewer_requests_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(published_models.write(tmp_path, "Gemma-3-27B"))
    flags = ("--gpu", "90GiB", "--max-model-len", "32K", "--context", "32K")
    assert main(["plan", folder, *flags]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "1 fits." in words and "--tp 8 does. 6 run at once with --max-num-seqs 6." in words


def test_a_model_that_does_not_fit(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "--gpu", "8GiB"]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "refused --model: the weights and the 2.717 GiB of a step take 15.27 GiB of the 8 GiB" in words
    assert "Split among GPUs, --tp 4 would do." in words and "none fits." in words


def test_the_same_for_programs(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, folder, "--gpu", "80GiB", "--block-size", "32")
    assert found["model"]["name"] == folder and found["weight_bytes"] == 2 * 6_738_415_616 + 4096 * 128 * 4
    assert found["kv"]["bytes_per_token"] == 524_288 and found["kv"]["bytes_per_block"] == 32 * 524_288
    [layers] = found["kv"]["layers"]
    assert (layers["attention"], layers["kv_heads"], layers["window"], layers["k_format"]) == ("MHA", 32, None, "bf16")
    assert found["pool"]["pages"] == [found["pool"]["bytes"] // (32 * 524_288)]
    assert found["context"] == {"tokens": 4096, "bytes": 2**31, "bytes_in_pages": 2**31, "served": True}
    assert found["lengths"]["p50"] == 1024 and found["load"]["fits"] is False
    assert [option["kind"] for option in found["options"]][:2] == ["reservation", "paging"]
    assert found["memory"] == {"kind": "gpu", "bytes": 80 * 2**30, "process_bytes": 0} and found["refusal"] is None
    assert found["step"]["bytes"] == sum(size for name, size in found["step"].items() if name != "bytes") > 2**30


def test_a_cpu_has_no_step_of_a_gpu_but_octavo_itself(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the processes take is set aside before the pool is sized, and belongs to what a load needs."""
    found = report(capsys, folder, "--memory", "20GiB", "--max-num-seqs", "16")
    processes = found["memory"]["process_bytes"]
    assert found["step"] is None and processes == PROCESS_BYTES + 32_000 * TOKEN_BYTES
    half = (20 * 2**30 - found["weight_bytes"] - processes) // 2
    assert half - 2**23 < found["pool"]["bytes"] <= half
    paging = found["options"][1]
    assert paging["memory_bytes"] == found["weight_bytes"] + paging["pool_bytes"] + processes + 1
    assert main(["plan", folder, "--memory", "20GiB", "--kv-cache-dtype", "int8", "--kv-refresh-interval", "64"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "a step logits" not in words and "libraries" not in words
    assert (
        "CPU 20 GiB free Octavo 350.5 MiB for its processes and a step's work refresh 2 GiB for one sequence" in words
    )


def test_a_cpu_that_is_filled_to_the_brim_has_room_for_octavo(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No flag is advised that would leave the processes nothing, and none is taken."""
    load = ("--max-num-seqs", "16", "--memory")
    needed = report(capsys, folder, *load, "64GiB")["options"][1]["memory_bytes"]
    for missing, is_advised in ((0, True), (2**20, False)):
        found = report(capsys, folder, *load, str(needed - missing))
        assert ("memory" in [option["kind"] for option in found["options"]]) is is_advised
    refused = report(capsys, folder, *load, str(needed - 2**20), "--kv-cache-memory-bytes", "32GiB", code=1)["refusal"]
    assert "but the weights and the 350.5 MiB of Octavo itself leave" in refused


def test_without_a_memory_and_without_room(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, folder)
    assert found["memory"] is None and found["pool"] is None and found["context"]["served"] is None
    found = report(capsys, folder, "--gpu", "8GiB", code=1)
    assert "--model" in found["refusal"] and found["gpus_needed"] == 4


def test_a_trace(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"prompt_tokens": {n}, "completion_tokens": 5000}}\n' for n in (10, 20, 30)))
    found = report(capsys, folder, "--lengths", str(trace))
    assert found["lengths"]["p50"] == 4096 and found["lengths"]["num_cut"] == 3
    assert main(["plan", folder, "--lengths", str(trace)]) == 0
    assert "100.0% are longer than the window" in capsys.readouterr().out


def test_settings_of_the_server_count(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From flags of either spelling, and from the file that octavo serve is started with."""
    config = tmp_path / "octavo.yaml"
    config.write_text("max-model-len: 2048\nport: 9000\nkv-cache-dtype: int8\n")
    found = report(capsys, folder, "--config", str(config), "--max_num_seqs=7", "--gpu=80GiB")
    assert found["context"]["tokens"] == 2048 and found["kv"]["bytes_per_token"] == 266_240
    assert found["load"]["requests"] == 7


# ---------------------------------------------------------------- where models come from
def test_a_gguf_file(capsys: pytest.CaptureFixture[str]) -> None:
    from smollm2 import smollm2_gguf

    found = report(capsys, str(smollm2_gguf()), "--context", "4096")
    unpacked = report(capsys, str(smollm2_gguf()), "--gpu", "16GiB")
    assert found["quantization"] == "stored" and unpacked["quantization"] == "none"
    assert 2 * found["weight_bytes"] < unpacked["weight_bytes"]
    assert found["kv"]["bytes_per_token"] == 23_040 and found["model"]["parameters"] == 134_515_008


def test_without_a_memory_a_gguf_file_is_reckoned_for_a_cpu_and_all_else_for_a_gpu(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, what is set aside and the words are those of one machine. Only a CPU keeps a file's codes."""
    from smollm2 import smollm2_gguf

    file, load = str(smollm2_gguf()), ("--max-num-seqs", "16")
    for model, flags, same, device in (
        (file, (), "--memory", "cpu"),
        (file, ("--quantization", "none"), "--gpu", "gpu"),
        (file, ("--dtype", "float16"), "--gpu", "gpu"),
        (folder, (), "--gpu", "gpu"),
    ):
        found, given = (report(capsys, model, *load, *flags, *there) for there in ((), (same, "64GiB")))
        assert found["memory"] is None and given["memory"]["kind"] == found["device"] == given["device"] == device
        for name in ("weight_bytes", "quantization", "step"):
            assert found[name] == given[name], name
        assert [each["memory_bytes"] for each in found["options"][:2]] == [
            each["memory_bytes"] for each in given["options"][:2]
        ]
        assert main(["plan", model, *load, *flags]) == 0
        words = " ".join(capsys.readouterr().out.split())
        assert ("of main memory, " in words) is ("a step logits" not in words) is (device == "cpu")
        assert ("a GPU's memory, " in words) is (device == "gpu")
    assert report(capsys, file, "--tp", "3")["device"] == "gpu"


def test_a_family_that_transformers_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sizes are asked of the library in a process of its own."""
    folder = published_models.write(tmp_path, "Gemma-2-9B")
    found = report(capsys, str(folder), "--tp", "16")
    windows = {layers["window"]: layers["layers"] for layers in found["kv"]["layers"]}
    assert windows == {4096: 21, None: 21} and found["model"]["parameters"] == 9_241_705_984
    assert found["kv"]["replication"] == 2 and found["kv"]["bytes_per_token_all_gpus"] == 2 * 344_064


def test_what_is_not_served_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "(MambaForCausalLM): transformers' MambaForCausalLM has no attention" in refusal(capsys, str(tmp_path))


def test_native_families_need_no_torch(folder: str) -> None:
    code = (
        "import sys; from server.cli import main; "
        f"assert main(['plan', {folder!r}, '--gpu', '80GiB']) == 0; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'fastapi', 'zmq') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]", result


HUB = """
import json, sys
from huggingface_hub import constants
constants.HF_HUB_CACHE = sys.argv[1]
from server.cli import main
sys.exit(main(["plan", *sys.argv[2:]]))
"""


def ask_hub(hub: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HF_ENDPOINT": hub, "HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-c", HUB, str(cache), *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_of_a_hub_id_config_json_alone_is_fetched(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny_models.build(tmp_path / "tiny").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    only_gguf = {"model.gguf": b"GGUF"}
    hub = FakeHub({"org/tiny": Repository(files), "org/gguf": Repository(only_gguf)})
    with hub.running():
        result = ask_hub(hub.endpoint, tmp_path / "hub", "org/tiny", "--json")
        assert result.returncode == 0, result
        assert json.loads(result.stdout)["model"]["origin"] == "Hugging Face Hub"
        assert hub.fetched() == ["config.json"]
        again = ask_hub(hub.endpoint, tmp_path / "hub", "org/tiny", "--json")
        assert json.loads(again.stdout)["model"]["origin"] == "Hugging Face Hub (cached)"
        for name, words in {
            "org/gguf": "it has no config.json",
            "org/gguf:model.gguf": "the sizes of a GGUF model stand in the file itself, which was not fetched yet",
        }.items():
            refused = ask_hub(hub.endpoint, tmp_path / "hub", name)
            assert refused.returncode == 2 and words in refused.stderr, refused
        assert hub.fetched() == ["config.json"]
    away = ask_hub("http://127.0.0.1:9", tmp_path / "hub", "org/tiny", "--json")
    assert json.loads(away.stdout)["model"]["origin"] == "Hugging Face Hub (cached)", away
    away = ask_hub("http://127.0.0.1:9", tmp_path / "hub", "org/other")
    assert away.returncode == 2 and "org/other" in away.stderr and away.stderr.count("\n") == 1


def test_the_default_model_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert refusal(capsys) == "The default model is not on this machine yet: name a model's folder, file or Hub id."
    assert not any(tmp_path.rglob("*.gguf"))


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "H200"), "--gpu must be a size such as 4096, 32K, 1.5M or 2.5GiB, got 'H200'."),
        (("--gpu", "80"), "--gpu 80 is 80 bytes, and no model fits into less than 1MiB: write 80GiB?"),
        (("--memory", "0"), "--memory 0 is 0 bytes, and no model fits into less than 1MiB."),
        (("--memory", "80k"), "--memory 80k is 80000 bytes, and no model fits into less than 1MiB."),
        (("--gpu", "-1GiB"), "--gpu must be a size such as 4096, 32K, 1.5M or 2.5GiB, got '-1GiB'."),
        (("--context", "-1k"), "--context must be a size such as"),
        (("--gpu", "1GiB", "--memory", "2GiB"), "--gpu 1GiB and --memory 2GiB: give one, for a GPU or for a CPU."),
        (("--tp", "0"), "--tp must be a whole number of at least 1, got '0'."),
        (("--tp", "two"), "--tp must be a whole number of at least 1, got 'two'."),
        (("--tp", "²"), "--tp must be a whole number of at least 1, got '²'."),
        (("--tp", "2", "--memory", "1GiB"), "--tp 2 splits a model among GPUs: give --gpu in place of --memory."),
        (
            ("--tp", "3"),
            "--tp 3 does not split the model's 32 query and 32 KV heads evenly: 1, 2, 4, 8, 16 or 32 would.",
        ),
        (("--context", "4097"), "--context 4097 is not within the window of 4096 tokens"),
        (("--context", "0"), "--context 0 is no length of a sequence: give at least 1."),
        (("--context", "long"), "--context must be a size such as"),
        (("--max-model-len", "8192"), "--max-model-len 8192 is not possible"),
        (("--lengths", "/nowhere"), "--lengths /nowhere cannot be read"),
        (("--gpu",), "--gpu: expected one argument; see octavo plan --help."),
        (("--lenghts", "x"), "unknown flag --lenghts: did you mean '--lengths'?"),
        (("--contxt=1",), "unknown flag --contxt: did you mean '--context'?"),
        (("--max-model", "1"), "unknown flag --max-model: did you mean '--max-model-len'?"),
        (("--block-size", "24"), "--block-size must be a power of two"),
        (("--dtype", "float16", "--memory", "64GiB"), "--dtype float16 is for GPUs"),
        (("--attention-backend", "triton", "--memory", "64GiB"), "--attention-backend triton is for GPUs: give --gpu"),
        (("--attention-backend", "flash-attn", "--memory", "64GiB"), "--attention-backend flash-attn is for GPUs"),
        (("--attention-backend", "cpu", "--gpu", "64GiB"), "--attention-backend cpu is for CPUs: give --memory"),
        (
            ("--batch-invariant", "--attention-backend", "reference", "--gpu", "64GiB"),
            "--batch-invariant asks that Triton computes attention: leave --attention-backend reference away.",
        ),
        (
            ("--batch-invariant", "--attention-backend", "flash-attn", "--gpu", "64GiB"),
            "--batch-invariant asks that Triton computes attention: leave --attention-backend flash-attn away.",
        ),
        (("--kv-cache-dtype", "int3"), "--kv-cache-dtype must be"),
        (("another",), "one MODEL at most, got"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: tuple[str, ...], words: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, folder, *arguments)


def test_a_file_of_the_folder(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, f"{folder}/config.json").endswith(
        f"config.json is a file of a model's folder; name the folder, --model {folder}."
    )


def test_sizes_that_no_model_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**published_models.OURS[LLAMA], "head_dim": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = f"--model: {tmp_path}/config.json: head_dim is 4096, and no model has more than 1024."
    assert refusal(capsys, str(tmp_path)) == expected


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is an empty folder" in refusal(capsys, str(tmp_path))


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["m", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 0
    assert capsys.readouterr().out == USAGE and max(map(len, USAGE.splitlines())) <= WIDTH
