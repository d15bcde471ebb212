"""What a machine or its container lets the engine take."""

from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from engine import build

CORES = build.usable_cores()


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("100000 100000", 1),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("90000000 100000", CORES),
        ("max 100000", CORES),
    ],
)
def test_threads_stay_within_the_containers_quota(cgroup: Path, quota: str, cores: int):
    (cgroup / "cpu.max").write_text(quota + "\n")
    assert build.usable_cores() == cores


def test_without_a_container_every_core_counts(cgroup: Path):
    assert 1 <= build.usable_cores() <= len(psutil.Process().cpu_affinity())


def test_memory_is_what_the_container_has_left(cgroup: Path):
    (cgroup / "memory.current").write_text("3000\n")
    (cgroup / "memory.max").write_text("10000\n")
    assert build.available_memory() == 7000
    (cgroup / "memory.max").write_text("2000\n")
    assert build.available_memory() == 0
    (cgroup / "memory.max").write_text("max\n")
    assert build.available_memory() > 1 << 20


def test_a_machine_whose_linears_are_not_exact_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    assert build._exactness(nn.Module(), torch.float32).startswith("not changed by other requests") and not caplog.text
    monkeypatch.setattr(build, "inexact", lambda layers, dtype: {"model.layers.0.o": "other bits with one thread"})
    said = build._exactness(nn.Module(), torch.float32)
    assert said.startswith("may be changed a little") and "model.layers.0.o: other bits with one thread" in said
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.name == "octavo.engine" and said in record.getMessage()
