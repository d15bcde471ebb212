"""The check script itself, on a CPU: it runs with few packages, a broken kernel is seen and hides no other, and what
hangs or crashes is stopped and told.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from flash_library import on_a_gpu
from gpu import check, engines, random_model, turns
from gpu.bench import Bench, Ceilings
from gpu.check import Process, Section, run_apart
from gpu.checks import dispatch, engine, offline
from gpu.engines import MODES
from gpu.findings import Findings

from engine.messages import Launch
from kernels.cpu import library
from kernels.triton import offers

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def environment(folder: Path, *allowed: str) -> dict[str, str]:
    """Of a Python that refuses packages from its start on."""
    start = f"from gpu.few_packages import refuse_others\nrefuse_others({allowed})\n"
    (folder / "sitecustomize.py").write_text(start)
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests")))
    return os.environ | {"PYTHONPATH": path, "OUT": str(folder / "out"), "PYTHON": sys.executable}


# ------------------------------------------------------------------ the script as it is called
@needs_triton
def test_every_section_runs_interpreted_with_few_packages(tmp_path: Path) -> None:
    """psutil is let through: a CPU is asked how much memory it has, a GPU is not."""
    command = ["bash", str(ROOT / "tests/gpu/check.sh"), "--interpret"]
    done = subprocess.run(command, env=environment(tmp_path, "psutil"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean nothing" in done.stdout and "MISSED" not in done.stdout
    sections = json.loads((tmp_path / "out" / "check.json").read_text())["sections"]
    assert list(sections) == [section.name for section in check.SECTIONS]
    for name, section in sections.items():
        assert section["lines"] and section["wrong"] == 0, name
    kinds = {name: {line["ok"] for line in section["lines"]} for name, section in sections.items()}
    assert {name for name, kind in kinds.items() if True in kind} == {
        "attention", "store", "elementwise", "linear", "blocks", "sampling", "engine", "offline"
    }  # fmt: skip
    asked = [line["what"] for section in sections.values() for line in section["lines"]]
    again = {re.match(r"\w+", what)[0] for what in asked if what.endswith(", again")}
    named = {"attention": "paged_attention", "linear": "pack_linear"}
    assert {named.get(op, op) for op in again} == set(dispatch.OPS) - {"pack_coded_linear"}


@needs_triton
def test_nothing_else_is_imported(tmp_path: Path) -> None:
    """By what a GPU needs: neither psutil nor gguf nor anything of a server."""
    code = "import sys, importlib\n"
    code += f"for name in {[section.path for section in check.SECTIONS]}: importlib.import_module(name)\n"
    code += "import engine.runner.ahead, engine.model.archs.llama\n"
    code += "for name in ('psutil', 'gguf', 'fastapi', 'prometheus_client', 'hypothesis'):\n"
    code += "    assert importlib.util.find_spec(name) is None and name not in sys.modules, name\n"
    subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), check=True, cwd=tmp_path)


@needs_triton
def test_a_broken_kernel_is_seen_and_hides_no_other(tmp_path: Path) -> None:
    code = "import sys\n"
    code += "from gpu import check\nfrom kernels.triton import elementwise, blocks\n"
    code += "right, turn = elementwise.rms_norm, elementwise.rotary\n"
    code += "def fail(*arguments): raise RuntimeError('no such kernel')\n"
    code += "elementwise.rms_norm = lambda x, *rest: right(x, *rest) * 1.1\n"
    code += "elementwise.rotary = fail\n"
    code += "sys.exit(check.main(['--interpret', '--out', 'out', 'elementwise', 'blocks']))"
    variables = environment(tmp_path) | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    sections = json.loads((tmp_path / "out" / "check.json").read_text())["sections"]
    wrong = [line["what"] for line in sections["elementwise"]["lines"] if line["ok"] is False]
    assert [words.split()[0] for words in wrong] == ["rms_norm"] * 4 + ["rotary"]
    assert sum("heads" in words for words in wrong) == 2
    assert "WRONG  rotary" in done.stdout and "no such kernel" in done.stdout
    right = [line["what"].split()[0] for line in sections["elementwise"]["lines"] if line["ok"]]
    assert {"add_rms_norm", "gate_mul", "gather_rows"} <= set(right)
    assert sections["blocks"]["wrong"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_condemns_no_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check.main(["attention"])
    assert end.value.code == 2 and "sees no GPU here; --interpret" in capsys.readouterr().err


# ------------------------------------------------------------------ sections as processes
SECTION = """
import os, signal, subprocess, sys, time

def run(bench):
    bench.findings.verdict(f"share {bench.share} of {bench.shares}", True)
    bench.findings.figure("speed", "3 TB/s", rate=3.0)
"""
ENDS = {
    "well": "",
    "wrong": "    bench.findings.verdict('bits', False)",
    "raises": "    raise ValueError('no such thing')",
    "exits": "    print('torn apart', file=sys.stderr); os._exit(3)",
    "dies": "    os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": """
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
    (bench.scratch / 'unfinished').write_text(str(child.pid))
    (bench.scratch / 'unfinished').rename(bench.scratch / 'child')
    time.sleep(600)""",
}


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, end in ENDS.items():
        (tmp_path / f"{name}.py").write_text(SECTION + end)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests"))))
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def section(name: str, limit: float = 100.0, shares: int = 0) -> Section:
    return Section(name, f"It {name}", limit, name, shares)


def test_what_becomes_of_sections(scratch: Path) -> None:
    """Each keeps what it had found."""
    some = [section("well", shares=2), *map(section, ("raises", "exits", "dies"))]
    outcomes = list(run_apart(some, scratch, 500.0))
    assert [outcome.section.name for outcome in outcomes] == [each.name for each in some]
    assert [len(outcome.wrong) for outcome in outcomes] == [0, 1, 1, 1]
    shares = [line.what for line in outcomes[0].findings.lines if line.ok]
    assert shares == ["share 0 of 2", "share 1 of 2"]
    last = [outcome.findings.lines[-1].text for outcome in outcomes]
    assert last[1] == "ValueError: no such thing"
    assert last[2] == "it ended with status 3: torn apart" and "SIGSEGV" in last[3]
    for outcome in outcomes:
        assert outcome.findings.lines[0].ok and outcome.findings.lines[1].numbers == {"rate": 3.0}
    shown = "\n".join(check.table(outcomes, is_interpreted=False))
    assert "It dies" in shown and "speed  3 TB/s" in shown and "mean nothing" not in shown
    end = shown[shown.index("\nWRONG\n") :].split("\n")
    assert [line.partition(":")[0].strip() for line in end[2:5]] == ["raises", "exits", "dies"]
    assert end[5:] == ["", "5 of 8 checks right, 3 WRONG"]


def test_what_hangs_is_stopped_with_all_that_it_has_started(scratch: Path) -> None:
    process = Process(section("hangs"), 0, scratch, 500.0)
    child = scratch / "child"
    wait_until(child.exists)
    assert is_running(int(child.read_text()))
    process.stop()
    wait_until(lambda: not is_running(int(child.read_text())))
    assert [line.text for line in process.finish().lines][:2] == ["right", "3 TB/s"]


def test_what_takes_too_long_is_stopped_and_leaves_others_what_is_kept_for_them(scratch: Path) -> None:
    outcomes = list(run_apart([section("hangs", 0.2, 1), section("hangs", 0.1), section("well", 90.0)], scratch, 90.5))
    texts = [[line.text for line in outcome.findings.lines] for outcome in outcomes]
    assert all(re.fullmatch(r"stopped after 0\.\d s", text) for [text] in texts[:2])
    assert texts[2] == ["right", "3 TB/s"]


def test_a_section_may_take_what_others_leave() -> None:
    """Arguments: now, its own limit, what is kept for those after it, the end."""
    assert check.until(0, 150, 320, 470) == 150
    assert check.until(100, 20, 300, 470) == 170
    assert check.until(460, 20, 0, 470) == 470
    assert check.until(0, 150, 320, 100) == 100, "of so little the first has as much as it may take"


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_no_time_is_left_for_is_not_begun(scratch: Path) -> None:
    outcomes = list(run_apart([section("well", shares=1), section("wrong")], scratch, 0.0))
    assert [len(outcome.wrong) for outcome in outcomes] == [1, 1]
    assert "no time was left" in outcomes[1].findings.lines[0].text and not list(scratch.iterdir())


def test_status_and_files(scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some, out = [section("well"), section("wrong"), section("exits")], tmp_path / "out"
    for name, status, words in (("well", 0, "1 of 1 checks right"), ("wrong", 1, "1 of 2 checks right, 1 WRONG")):
        assert check.main(["--out", str(out), name], some) == status
        assert words in capsys.readouterr().out
        found = json.loads((out / "check.json").read_text())
        assert list(found["sections"]) == [name] and found["sections"][name]["wrong"] == status
        assert not found["interpreted"]
    assert check.main(["--out", str(out)], some) == 1
    assert {path.name for path in out.iterdir()} == {"check.json", "table.txt", "log.txt"}
    assert (out / "table.txt").read_text() in capsys.readouterr().out
    assert (out / "log.txt").read_text().endswith("---- exits\ntorn apart\n")
    with pytest.raises(SystemExit):
        check.main(["nonsense"], some)


def test_triton_is_asked_for_all_that_it_has() -> None:
    assert {candidate.op for candidate in offers.CANDIDATES} == set(dispatch.OPS)


def test_everything_ends_in_eight_minutes() -> None:
    """Also if each section takes all that is kept for it."""
    together = [section for section in check.SECTIONS if section.shares]
    alone = [section for section in check.SECTIONS if not section.shares]
    assert check.limit_of(together) + sum(section.limit for section in alone) <= check.LIMIT < 480
    assert 16 <= sum(section.shares for section in together) <= 20, "processes on some 16 cores"
    assert [section.name for section in alone][:4] == ["ceilings", "decode", "prefill", "offline"]
    names = [section.name for section in check.SECTIONS]
    assert len(set(names)) == len(names)


# ------------------------------------------------------------------ engines
def test_what_is_compiled_for_checked_engines_serves_timed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ in the size of the pool alone, which no kernel is compiled for."""
    asked: list[dict[str, object]] = []

    def build(launch: Launch, report: object) -> NoReturn:
        asked.append(dict(launch.settings))
        raise InterruptedError

    monkeypatch.setattr(engines, "build_core", build)
    monkeypatch.setattr(engines, "write", lambda folder, shape, device: folder)
    for share in range(len(MODES)):
        engine.run(Bench(Findings(), tmp_path, False, share, len(MODES)))
    assert [each.pop("num_gpu_blocks_override") for each in asked] == [engine.BLOCKS] * len(MODES)
    checked, asked[:] = list(asked), []
    offline.run(Bench(Findings(), tmp_path, False))
    assert asked == checked and len(asked) == len(MODES)


def test_native_kernels_are_compiled_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []

    def load() -> None:
        running.append(len(running))
        time.sleep(0.05)
        assert len(running) == 1
        running.clear()

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(library, "refusal", lambda: "no compiler")
    with ThreadPoolExecutor() as pool:
        assert set(pool.map(turns.native_kernels, [tmp_path] * 3)) == {"no compiler"}


def test_one_process_makes_the_model_that_several_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(folder: Path, *_: object) -> None:
        made.append(folder)
        time.sleep(0.05)
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(random_model, "_make", make)
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            pool.submit(random_model.write, tmp_path / "model", random_model.TINY, torch.device("cpu"))
    assert made == [tmp_path / "model"]


# ------------------------------------------------------------------ what is aimed at
@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """On no GPU: what it times takes a second if it is a sort, else as long as `bench.took` says."""
    monkeypatch.setattr(Bench, "device", torch.device("cpu"))
    monkeypatch.setattr(Bench, "took", 1.0, raising=False)
    monkeypatch.setattr(
        Bench, "seconds", lambda self, calls, captured=True: 1.0 if calls[0].func is torch.sort else self.took
    )
    bench = Bench(Findings(), tmp_path, is_tiny=False)
    bench.ceilings = Ceilings(copy=100.0, matmul=1000.0)
    return bench


CALL = partial(print)


@pytest.mark.parametrize(("took", "words"), [(1.0, ""), (1.1, ": MISSED")])
def test_targets_that_are_missed_are_told_and_fail_nothing(timed: Bench, took: float, words: str) -> None:
    timed.took = took
    timed.bandwidth("it", 80, [CALL], 0.8)
    timed.bandwidth("it", 80, [CALL], within=1.0)
    timed.products("it", 450, [CALL], 0.45)
    timed.beside("torch", timed.seconds([CALL]), 3.0, 3)
    told = [line.text.partition("(")[2] for line in timed.findings.lines]
    assert told == [f"target {each}{words})" for each in ("80%", "1e+06 us", "45%", "3")]
    assert all(line.ok is None for line in timed.findings.lines)
    timed.bandwidth("it", 1, [CALL])
    timed.products("it", 1, [CALL])
    timed.beside("torch", 1.0, 0.1)
    assert not any("target" in line.text for line in timed.findings.lines[4:])


@needs_triton
def test_merging_is_what_is_left_out(timed: Bench) -> None:
    from gpu.checks import decode

    from kernels.triton import attention

    launched = attention.merge_splits
    seen: list[object] = []
    timed.seconds = lambda calls: seen.append(attention.merge_splits[1, 2](None, key=3)) or 0.9
    decode.merging(timed, [CALL], 1.0)
    decode.merging(timed, [CALL], 0.94)
    decode.merging(timed, [CALL], 0.5)
    assert [line.text for line in timed.findings.lines] == [
        "10.0% of the time  (target 5%: MISSED)", "4.3% of the time  (target 5%)", "0.0% of the time  (target 5%)"
    ]  # fmt: skip
    assert seen == [None] * 3 and attention.merge_splits is launched


@needs_triton
def test_draws_are_graded_beside_a_sort_and_a_pass_over_logits(timed: Bench) -> None:
    from gpu.checks import kernels

    timed.took = 0.5
    for rows in (1, 64):
        kernels.draws(timed, 100, rows)
    alone, crowd = timed.findings.lines[:7], timed.findings.lines[7:]
    assert not any("target" in line.text for line in alone)
    targets = {line.what: line.text.partition("(")[2] for line in crowd if "target" in line.text}
    assert targets == {"draw 64 x 100, temperature 1": "target 70%)", "  beside torch.sort": "target 3: MISSED)"}
    assert sum("2.00 times as fast" in line.text for line in crowd) == 2


@needs_triton
def test_few_rows_should_be_stored_in_no_more_than_a_launch(timed: Bench) -> None:
    from gpu.checks import kernels

    timed.took = 6e-6
    for rows in (257, 256):
        kernels.stores(timed, random_model.TINY, rows)
    missed = ["MISSED" in line.text for line in timed.findings.lines]
    assert missed == [False] * 4 + [True] * 4


# ------------------------------------------------------------------ attention
@needs_triton
def test_attention_by_splits_is_computed_by_splits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little room partial results have: else it would be compared with itself."""
    from gpu.checks import attention as section
    from gpu.pages import Kind

    from kernels.ops import LayerPages
    from kernels.triton import attention

    ways: list[object] = []
    monkeypatch.setattr(attention, "STATES", 2**20)
    monkeypatch.setattr(attention.Call, "by_splits", lambda call, alone: ways.append(("by splits", alone)))
    monkeypatch.setattr(attention.Call, "by_rows", lambda call: ways.append("by rows"))
    kind = Kind(torch.float16, group=4, **section.LARGE)
    pages = LayerPages(torch.zeros(1, kind.spec.block_bytes, dtype=torch.uint8), kind.spec, 1)
    rows, lengths = torch.tensor([0, *section.ROWS]), torch.tensor(section.MIXED, dtype=torch.int32)
    tables = torch.zeros(len(lengths), max(section.MIXED) // kind.block_size + 1, dtype=torch.int32)
    q = torch.zeros(int(rows.sum()), kind.kv_heads * kind.group, kind.head_dim, dtype=kind.dtype)
    for way in (section.SPLITS_ALONE, section.ROWS_ALONE, section.IN_ROUNDS):
        with section.by(way):
            attention.paged_attention(q, pages, tables, rows.cumsum(0).to(torch.int32), lengths, 1.0)
    assert ways == [("by splits", False), *[("by splits", True), "by rows"] * 2]


# ------------------------------------------------------------------ flash-attn
@needs_triton
def test_flash_attn_is_compared_where_it_is_installed(timed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu.checks import flash

    compared: list[object] = []
    monkeypatch.setattr(flash, "compare", lambda bench, name, kernel: compared.append((name, type(kernel))))
    with on_a_gpu(monkeypatch) as library:
        flash.run(timed)
        missing = [(line.what, line.text.partition(" (")[0]) for line in timed.findings.lines]
        library.install(monkeypatch, 2, 3)
        flash.run(timed)
    assert missing == [
        ("flash-attn 3", "flash_attn_interface is not installed"), ("flash-attn 2", "flash_attn is not installed")
    ]  # fmt: skip
    assert compared == [("flash-attn 3", flash.Flash3), ("flash-attn 2", flash.Flash2)]


COMPARE_FLASH = """
from pathlib import Path
from types import SimpleNamespace

import interpreted
from flash_library import FlashLibrary
from gpu.bench import Bench
from gpu.checks.flash import compare
from gpu.findings import Findings

from kernels import flash, reference

interpreted.improve()
library, splits = FlashLibrary(), set()
flash.choose = lambda *asked: SimpleNamespace(function=reference.paged_attention)

def of(function, factor=1.0):
    def call(*arguments, **options):
        splits.add(options.get("num_splits"))
        if "num_splits" in options:
            options["num_splits"] = 1  # all that the stand-in takes
        return function(*arguments, **options) * factor
    return call

for kernel, wrong in (
    (flash.Flash3(of(library.with_kvcache_3)), 0),
    (flash.Flash2(of(library.varlen, 1.1), of(library.with_kvcache_2)), 4),
    (flash.Flash2(of(library.varlen), None), 0),
):
    findings = Findings()
    compare(Bench(findings, Path(), is_tiny=True), type(kernel).__name__, kernel)
    assert [line.ok for line in findings.lines].count(False) == wrong, findings.lines
    assert [line.ok for line in findings.lines].count(True) == 12 - wrong, findings.lines
    beside = [line for line in findings.lines if line.what.startswith("  beside")]
    assert len(beside) == 3 and all("times as fast" in line.text for line in beside), findings.lines
assert splits == {None, 0, 1}, splits
"""


@needs_triton
def test_flash_attn_is_judged_and_timed(tmp_path: Path) -> None:
    """By a stand-in, whose release 2 errs where it computes several rows: all but single ones."""
    variables = environment(tmp_path) | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", COMPARE_FLASH], env=variables, cwd=tmp_path, check=True)
