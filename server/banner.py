"""What the terminal shows: progress while loading, then one block that says what is served and how to ask."""

import json
import logging
from typing import Any, TextIO

from tqdm import tqdm

from configs.settings import Settings
from engine import EngineReady

logger = logging.getLogger("octavo.server")

EVERYWHERE = ("0.0.0.0", "::")


class Progress:
    """A bar a phase on a terminal, a line a phase in the log elsewhere; nothing where the log leaves `info` out."""

    def __init__(self, stream: TextIO | None) -> None:
        """None: there is to be nothing but the log."""
        has_bars = stream is not None and stream.isatty() and logger.isEnabledFor(logging.INFO)
        self._terminal = stream if has_bars else None
        self._phase = ""
        self._bar: Any = None

    def report(self, phase: str, fraction: float) -> None:
        if phase != self._phase:
            self.close()
            self._phase = phase
            if self._terminal is not None:
                layout = "{desc} {percentage:3.0f}% |{bar:30}| {elapsed}"
                self._bar = tqdm(total=1.0, desc=phase, bar_format=layout, file=self._terminal)
            else:
                logger.info(phase)
        if self._bar is not None and fraction > self._bar.n:
            self._bar.update(min(fraction, 1.0) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def startup_block(
    model: str, ready: EngineReady, settings: Settings, host: str, port: int, *, chats: bool = True
) -> str:
    """Model, machine, pool, address, and a command to paste. chats: the model has a chat template."""
    url = f"{'https' if settings.ssl_certfile else 'http'}://{_shown(host)}:{port}"
    lines = {**ready.summary, "address": f"{url} (API {url}/v1, metrics {url}/metrics)"}
    if host in EVERYWHERE:
        why = "" if settings.host else ", since an API key is set; --host 127.0.0.1 keeps it to this machine"
        lines["reachable"] = f"from other machines: all interfaces ({host}){why}"
    width = max(map(len, lines))
    rows = "\n".join(f"  {name:<{width}}  {value}" for name, value in lines.items())
    key = " -H 'Authorization: Bearer KEY'" if settings.api_key else ""
    asks = {"messages": [{"role": "user", "content": "What is an octavo?"}]} if chats else {"prompt": "An octavo is"}
    path, body = "chat/completions" if chats else "completions", json.dumps({**asks, "max_tokens": 64})
    curl = f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"\nOctavo serves {model}\n{rows}\n\n  {curl}\n"


def _shown(host: str) -> str:
    if host in EVERYWHERE:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
