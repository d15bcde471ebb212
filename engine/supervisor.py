"""Starts the engine process, watches it and ends it."""

import asyncio
import contextlib
import shutil
import signal
import tempfile

import msgspec

from configs.load import environment_without_secrets
from engine.child import command
from engine.messages import Launch

STOP_SECONDS = 5.0
"""How long an engine told to shut down may take before it is killed."""


class ChildProcess:
    """One engine process and the private folder that holds its sockets."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="octavo-")  # mode 0700
        self.address = f"ipc://{self._folder}/engine"
        self._process: asyncio.subprocess.Process | None = None

    async def spawn(self, launch: Launch) -> None:
        """Inherits no __main__ and no working directory."""
        self._process = await asyncio.create_subprocess_exec(
            *command("engine.process", self.address),
            stdin=asyncio.subprocess.PIPE,
            env=environment_without_secrets(),
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died at once: `wait` tells
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            await self._process.stdin.drain()
        # Standard input stays open: its end tells the child that this process is gone.

    async def wait(self) -> str:
        """Returns, in words, how the process ended."""
        assert self._process is not None
        code = await self._process.wait()
        if code == -signal.SIGKILL:
            return "was killed (signal 9: often the system running out of memory; see --kv-cache-memory-bytes)"
        if code < 0:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with code {code}"

    async def stop(self, patience: float = STOP_SECONDS) -> None:
        """Waits for an engine that was told to go, then kills it; removes the sockets."""
        if self._process is not None and self._process.returncode is None:
            try:
                await asyncio.wait_for(self._process.wait(), patience)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
