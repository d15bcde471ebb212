"""Listening, ending, and what the terminal shows. The command as a whole: test_process.py."""

import io
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit import ScriptedServer

from configs.errors import SettingsError
from configs.settings import Settings
from engine.errors import StartupError
from engine.messages import CacheInfo, EngineReady
from server.banner import Progress, startup_block
from server.serving import bind

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------------- listening
def test_a_port_in_use_is_one_sentence_that_names_the_flag():
    with bind(Settings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=rf"^cannot listen on 127\.0\.0\.1 port {port}: address already in use.*--port"
        ):
            bind(Settings(port=port))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 64])
def test_an_address_that_is_not_ours(host: str):
    with pytest.raises(StartupError, match=rf"^cannot listen on {host}\b.*--host") as refused:
        bind(Settings(host=host, port=0))
    assert "--port" not in str(refused.value)


def test_closed_to_the_network_unless_a_key_guards_it():
    for settings, host in ((Settings(port=0), "127.0.0.1"), (Settings(port=0, api_key=("k",)), "0.0.0.0")):
        with bind(settings) as listener:
            assert listener.getsockname()[0] == host


def test_ipv6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        with bind(Settings(host="::1", port=0)) as listener:
            assert listener.family == socket.AF_INET6
    except StartupError as error:
        pytest.skip(str(error))


# ---------------------------------------------------------------------- the end
def test_the_end_does_not_wait_for_a_thread():
    """Nor does the interpreter tear down what the thread still uses."""
    program = """if True:
        import asyncio, threading
        from configs.settings import Settings
        from server.context import ServerContext
        from server.metrics import Metrics
        from server.serving import Serving

        context = ServerContext(Settings(), Metrics())
        began = threading.Event()

        async def leave():
            work = asyncio.create_task(context.aside.run(1 << 20, lambda: (began.set(), threading.Event().wait())))
            while not began.is_set():
                await asyncio.sleep(0.01)
            work.cancel()

        asyncio.run(leave())
        Serving(context, None)._leave_threads(7)
        print("not reached")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (7, ""), done.stderr


# ---------------------------------------------------------------------- the terminal
READY = EngineReady(CacheInfo(64, 16, 4096, 256, "bf16", 512, True), {"model": "tiny", "KV pool": "64 pages"}, 259)


def test_the_start_up_block_has_a_command_to_paste():
    block = startup_block("tiny", READY, Settings(), "0.0.0.0", 8123)
    assert "Octavo serves tiny" in block and "64 pages" in block
    assert "http://127.0.0.1:8123" in block and "curl http://127.0.0.1:8123/v1/chat/completions" in block
    assert "Authorization" not in block


def test_a_model_without_a_chat_template_is_asked_otherwise():
    block = startup_block("tiny", READY, Settings(), "127.0.0.1", 8123, chats=False)
    assert "/v1/completions" in block and '"prompt"' in block and "chat/completions" not in block


def test_the_start_up_block_shows_that_a_key_is_needed_but_not_the_key():
    block = startup_block("tiny", READY, Settings(api_key=("secret",)), "::1", 8000)
    assert "Authorization: Bearer KEY" in block and "secret" not in block and "http://[::1]:8000" in block


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_progress_is_a_line_a_phase_where_there_is_no_terminal(stream, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    progress = Progress(stream)
    for phase, done in (("downloading", 0.0), ("downloading", 0.5), ("loading weights", 0.1), ("loading weights", 1.0)):
        progress.report(phase, done)
    progress.close()
    assert caplog.messages == ["downloading", "loading weights"] and (stream is None or not stream.getvalue())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_silent_where_the_log_leaves_info_out(caplog: pytest.LogCaptureFixture):
    caplog.set_level("WARNING")
    out = Terminal()
    progress = Progress(out)
    progress.report("loading weights", 0.5)
    progress.close()
    assert not out.getvalue() and not caplog.messages


def test_progress_is_a_bar_on_a_terminal(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    out = Terminal()
    progress = Progress(out)
    for done in (0.0, 0.5, 1.0, 1.5):
        progress.report("loading weights", done)
    progress.close()
    progress.close()
    assert "loading weights" in out.getvalue() and "100%" in out.getvalue()


def test_the_start_up_block_of_https():
    block = startup_block("tiny", READY, Settings(ssl_certfile="cert.pem"), "0.0.0.0", 8123)
    assert "curl https://127.0.0.1:8123/v1" in block and "metrics https://127.0.0.1:8123/metrics" in block
    assert "http://" not in block


# ---------------------------------------------------------------------- behind a proxy
def test_root_path():
    """A proxy may strip it or not."""
    with ScriptedServer({"s1": b"AB"}, root_path="/llm/one", api_key=("k",)) as server:
        body = {"model": "scripted", "prompt": "s1"}
        for prefix in ("", "/llm/one"):
            assert server.http.post(f"{prefix}/v1/completions", json=body).json()["choices"][0]["text"] == "AB"
            nobody = {"authorization": "Bearer x"}
            for path in ("/health", "/readyz", "/metrics", "/", "/web/page.js"):
                assert server.http.get(prefix + path, headers=nobody).status_code == 200, prefix + path
            assert server.http.get(f"{prefix}/v1/models", headers=nobody).status_code == 401
        assert server.http.get("/llm/one/openapi.json").json()["servers"] == [{"url": "/llm/one"}]
        for path in (
            "/llm/v1/models",
            "/llm/onev1/models",
            "/LLM/one/v1/models",
            "/llm/one/llm/one/v1/models",
        ):
            assert server.http.get(path).status_code == 404, path
        bare = server.http.get("/llm/one", headers=nobody)
        assert (bare.status_code, bare.headers["location"]) == (307, "/llm/one/")
        assert server.metric("http_requests_total", handler="/v1/completions", method="POST", status="2xx") == 2


def test_the_page_asks_for_nothing_above_its_own_path():
    with ScriptedServer({}) as server:
        for path in ("/", "/web/page.js"):
            text = server.http.get(path).text
            assert not re.search(r"""(href|src)="/|fetch\(["'`]/""", text), path


@pytest.mark.parametrize(
    "path", ["llm", "/llm/", "/", "//x", "/a b", "/ll m?x", "/a/../b", "/a/..", "/.", "/./b", "/é", "/a%20b"]
)
def test_what_is_no_root_path(path: str):
    with pytest.raises(SettingsError) as caught:
        Settings.create({"root_path": path})
    assert str(caught.value) == (
        "--root-path must be a path like /llm or /apps/llm: a slash before each part, none at the end; parts, other "
        f"than . and .., of ASCII letters, digits and . _ ~ -, got {path!r}."
    )


@pytest.mark.parametrize("path", ["/llm", "/a/b", "/.a/..b/c..", "/...", "/A-1_~"])
def test_what_is_a_root_path(path: str):
    assert Settings.create({"root_path": path}).root_path == path
