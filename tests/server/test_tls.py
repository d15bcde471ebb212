"""HTTPS through the server's own protocol class, with certificates made here by openssl."""

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from kit import ScriptedServer, receive_until

from configs.settings import Settings
from engine.errors import StartupError
from server.serving import http_config
from server.tls import load_certificates

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
PASSWORD = "a-password"


@dataclass
class Certificates:
    folder: Path

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """server.pem, server.key, the same key encrypted, both in one file; a client's, signed by it; somebody else's."""
    folder = tmp_path_factory.mktemp("tls")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name in ("server", "stranger"):
        openssl(folder, *new, "-subj", f"/CN={name}", *names, "-keyout", f"{name}.key", "-out", f"{name}.pem")
    openssl(folder, "pkcs8", "-topk8", "-in", "server.key", "-out", "locked.key", "-passout", f"pass:{PASSWORD}")
    request = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=client")
    openssl(folder, *request, "-keyout", "client.key", "-out", "client.csr")
    sign = ("x509", "-req", "-in", "client.csr", "-CA", "server.pem", "-CAkey", "server.key", "-CAcreateserial")
    openssl(folder, *sign, "-days", "2", "-out", "client.pem")
    weak = ("req", "-x509", "-newkey", "rsa:512", "-nodes", "-days", "2", "-subj", "/CN=weak")
    openssl(folder, *weak, "-keyout", "weak.key", "-out", "weak.pem")
    openssl(folder, "x509", "-in", "server.pem", "-outform", "der", "-out", "server.der")
    joined = {
        "both.pem": ("server.key", "server.pem"),
        "mixed.pem": ("server.key", "stranger.pem"),
        "empty": (),
        "damaged-chain.pem": ("server.pem", "damaged.pem"),
    }
    for name, kind in (("damaged.pem", "CERTIFICATE"), ("damaged.key", "PRIVATE KEY")):
        (folder / name).write_text(f"-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n")
    for name, parts in joined.items():
        (folder / name).write_bytes(b"".join((folder / part).read_bytes() for part in parts))
    return Certificates(folder)


def trusting(files: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files / "server.pem")


@pytest.fixture(scope="module")
def server(files: Certificates) -> Iterator[ScriptedServer]:
    settings = {"ssl_certfile": files / "server.pem", "ssl_keyfile": files / "server.key"}
    with ScriptedServer({"s1": b"ABCDEF"}, **settings) as server:
        yield server


def client(server: ScriptedServer, context: ssl.SSLContext) -> httpx2.Client:
    return httpx2.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context, timeout=20.0)


def test_answers_and_streams(server: ScriptedServer, files: Certificates) -> None:
    with client(server, trusting(files)) as http:
        assert http.get("/health").json()["status"] == "ok"
        body = {"model": "scripted", "prompt": "s1", "max_tokens": 9}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "ABCDEF"
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            text = "".join(answer.iter_text())
        assert text.endswith("data: [DONE]\n\n") and json.loads(text.split("\n")[0].removeprefix("data: "))
        assert http.post("/v1/completions", content=b" " * 300_000).status_code == 400


def test_the_certificate_is_checked(server: ScriptedServer) -> None:
    with client(server, ssl.create_default_context()) as http, pytest.raises(httpx2.ConnectError, match="certificate"):
        http.get("/health")


def test_bounds_hold_behind_tls(server: ScriptedServer, files: Certificates) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port), 20.0) as plain,
        trusting(files).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: kit\r\nX: " + b"x" * (1 << 20))  # all before it reads
        assert receive_until(connection, b"}}").startswith(b"HTTP/1.1 431 ")


def test_plain_http_gets_no_answer_and_does_no_harm(server: ScriptedServer, files: Certificates) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: kit\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not connection.recv(1 << 16).startswith(b"HTTP")
    with client(server, trusting(files)) as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("certificate", "key", "password"),
    [("server.pem", "locked.key", PASSWORD), ("both.pem", None, None), ("server.pem", "server.key", "not needed")],
)
def test_forms_of_the_key(certificate: str, key: str | None, password: str | None, files: Certificates) -> None:
    settings = {
        "ssl_certfile": files / certificate,
        "ssl_keyfile": key and files / key,
        "ssl_keyfile_password": password,
    }
    with ScriptedServer({}, **settings) as server, client(server, trusting(files)) as http:
        assert http.get("/health").status_code == 200


def test_clients_with_certificates(files: Certificates) -> None:
    settings = {"ssl_certfile": files / "both.pem", "ssl_ca_certs": files / "server.pem"}
    with ScriptedServer({}, **settings) as server:
        known = trusting(files)
        known.load_cert_chain(files / "client.pem", files / "client.key")
        with client(server, known) as http:
            assert http.get("/health").status_code == 200
        stranger = trusting(files)
        stranger.load_cert_chain(files / "stranger.pem", files / "stranger.key")
        for context in (trusting(files), stranger):
            with client(server, context) as http, pytest.raises(httpx2.TransportError):
                http.get("/health")


# ---------------------------------------------------------------------- what cannot start
def refusal(settings: dict[str, str]) -> str:
    given = Settings(**settings)
    with pytest.raises(StartupError) as caught:
        load_certificates(http_config(lambda *_: None, given), given)  # type: ignore[arg-type,return-value]
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ssl_certfile": "absent.pem"}, r"^--ssl-certfile .*absent\.pem cannot be read: no such file or directory\.$"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "absent.key"}, r"^--ssl-keyfile .*absent\.key cannot be read"),
        ({"ssl_certfile": "both.pem", "ssl_ca_certs": "absent"}, r"^--ssl-ca-certs .*absent cannot be read"),
        ({"ssl_certfile": "server.pem", "ssl_keyfile": "locked.key"}, r"is encrypted: give --ssl-keyfile-password\.$"),
    ],
)
def test_files_that_do_not_serve(settings: dict[str, str], words: str, files: Certificates) -> None:
    assert re.search(words, refusal({name: files / file for name, file in settings.items()}))


SERVER = {"ssl_certfile": "server.pem", "ssl_keyfile": "server.key"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"ssl_certfile": "server.pem"},
            "--ssl-certfile {}/server.pem holds no private key in PEM, but a certificate; give --ssl-keyfile.",
        ),
        (
            {"ssl_certfile": "server.key", "ssl_keyfile": "server.pem"},
            "--ssl-certfile {}/server.key holds no certificate in PEM, but a private key.",
        ),
        (
            {"ssl_certfile": "server.pem", "ssl_keyfile": "stranger.pem"},
            "--ssl-keyfile {}/stranger.pem holds no private key in PEM, but a certificate.",
        ),
        ({**SERVER, "ssl_certfile": "empty"}, "--ssl-certfile {}/empty holds no certificate in PEM."),
        ({**SERVER, "ssl_certfile": "server.der"}, "--ssl-certfile {}/server.der holds no certificate in PEM."),
        (
            {**SERVER, "ssl_certfile": "damaged.pem"},
            "--ssl-certfile {}/damaged.pem is damaged: a certificate in it cannot be read.",
        ),
        (
            {**SERVER, "ssl_certfile": "damaged-chain.pem"},
            "--ssl-certfile {}/damaged-chain.pem is damaged: a certificate in it cannot be read.",
        ),
        (
            {**SERVER, "ssl_certfile": "weak.pem", "ssl_keyfile": "weak.key"},
            "--ssl-certfile {}/weak.pem cannot be used: ee key too small.",
        ),
        ({**SERVER, "ssl_keyfile": "empty"}, "--ssl-keyfile {}/empty holds no private key in PEM."),
        (
            {**SERVER, "ssl_keyfile": "damaged.key"},
            "--ssl-keyfile {}/damaged.key is damaged: the private key in it cannot be read.",
        ),
        (
            {**SERVER, "ssl_keyfile": "stranger.key"},
            "--ssl-keyfile {0}/stranger.key holds the key of another certificate than that in --ssl-certfile "
            "{0}/server.pem.",
        ),
        (
            {**SERVER, "ssl_keyfile": "weak.key"},
            "--ssl-keyfile {0}/weak.key holds the key of another certificate than that in --ssl-certfile "
            "{0}/server.pem.",
        ),
        (
            {"ssl_certfile": "mixed.pem"},
            "--ssl-certfile {0}/mixed.pem holds the key of another certificate than that in --ssl-certfile "
            "{0}/mixed.pem.",
        ),
        ({**SERVER, "ssl_ca_certs": "empty"}, "--ssl-ca-certs {}/empty holds no certificate in PEM."),
        (
            {**SERVER, "ssl_ca_certs": "server.key"},
            "--ssl-ca-certs {}/server.key holds no certificate in PEM, but a private key.",
        ),
        (
            {**SERVER, "ssl_ca_certs": "damaged.pem"},
            "--ssl-ca-certs {}/damaged.pem is damaged: a certificate in it cannot be read.",
        ),
    ],
)
def test_which_file_is_wrong_and_how(settings: dict[str, str], words: str, files: Certificates) -> None:
    assert refusal({name: files / file for name, file in settings.items()}) == words.format(files.folder)


@pytest.mark.parametrize(
    ("password", "words"),
    [
        (
            "a-wrong-one",
            "--ssl-keyfile-password is not the password of --ssl-keyfile {}/locked.key, or that file is damaged.",
        ),
        ("a-wrong-one" * 200, "--ssl-keyfile-password cannot be used: password cannot be longer than 1024 bytes."),
    ],
    ids=["another", "too long"],
)
def test_a_wrong_password_is_not_shown(password: str, words: str, files: Certificates) -> None:
    given = {name: files / file for name, file in {**SERVER, "ssl_keyfile": "locked.key"}.items()}
    given["ssl_keyfile_password"] = password
    assert refusal(given) == words.format(files.folder)
    assert "a-wrong-one" not in repr(Settings(**given))


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"])
def test_a_flag_without_a_certificate(name: str) -> None:
    assert refusal({name: "x-y-z"}) == f"--{name.replace('_', '-')} needs --ssl-certfile."
