"""What the terminal shows: progress while loading, then one block that says what is served and how to ask."""

import json
from typing import Any, TextIO

from tqdm import tqdm

from configs.settings import Settings
from engine import EngineReady


class Progress:
    """A bar a phase on a terminal, a line a phase elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._bar: Any = None

    def report(self, phase: str, fraction: float) -> None:
        if phase != self._phase:
            self.close()
            self._phase = phase
            if self._stream.isatty():
                layout = "{desc} {percentage:3.0f}% |{bar:30}| {elapsed}"
                self._bar = tqdm(total=1.0, desc=phase, bar_format=layout, file=self._stream)
            else:
                print(phase, file=self._stream, flush=True)
        if self._bar is not None and fraction > self._bar.n:
            self._bar.update(min(fraction, 1.0) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def startup_block(model: str, ready: EngineReady, settings: Settings, host: str, port: int) -> str:
    """Model, machine, pool, address, and a command to paste."""
    url = f"http://{_shown(host)}:{port}"
    lines = {**ready.summary, "address": f"{url} (API {url}/v1, metrics {url}/metrics)"}
    width = max(map(len, lines))
    rows = "\n".join(f"  {name:<{width}}  {value}" for name, value in lines.items())
    key = " -H 'Authorization: Bearer KEY'" if settings.api_key else ""
    body = json.dumps({"messages": [{"role": "user", "content": "What is an octavo?"}], "max_tokens": 64})
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"\nOctavo serves {model}\n{rows}\n\n  {curl}\n"


def _shown(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
