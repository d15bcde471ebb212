"""A running `octavo serve`, and what it has counted, as its own metrics say."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from kit import eventually
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 180.0


@dataclass
class Served:
    """A running `octavo serve`."""

    url: str

    def counts(self) -> dict[tuple[str, ...], float]:
        """(name, label=value, …) -> value at /metrics; the model's and engine's labels left out."""
        text = httpx2.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        return {
            (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))):
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }  # fmt: skip


@dataclass
class Load:
    """What the server counted between two looks at it."""

    before: dict[tuple[str, ...], float]
    after: dict[tuple[str, ...], float]

    def added(self, *key: str) -> float:
        """Of one name and its labels, or of all labels where none is given."""
        return sum(
            value - self.before.get(name, 0.0)
            for name, value in self.after.items()
            if name == key or (len(key) == 1 and name[0] == key[0])
        )

    def check(self, requests: int, output_tokens: int, prompt_tokens: int) -> None:
        """Every one of `requests` was answered to its last token and nothing else happened."""
        assert self.added("vllm:request_success_total", "finished_reason=length") == requests
        assert self.added("vllm:request_success_total") == requests
        assert self.added("vllm:generation_tokens_total") == output_tokens
        assert self.added("vllm:prompt_tokens_total") == prompt_tokens
        failed = [name for name in self.after if "status=5xx" in name or "status=4xx" in name]
        assert not [name for name in failed if self.added(*name)], "an answer that was not 2xx"


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    """The command with these arguments, on a free port; it must end well. `folder`: for its output."""
    log, block = folder / "log", folder / "block"
    command = [sys.executable, "-P", "-m", "server", "serve", *arguments, "--port", "0"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    with log.open("wb") as errors, block.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=inherited)

    def address() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()
        return re.search(r"address\s+(http://\S+)", block.read_text())

    try:
        eventually(lambda: address() is not None, START_SECONDS)
        found = address()
        assert found is not None
        yield Served(found[1])
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
