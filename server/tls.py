"""The files of --ssl-*, looked at one by one before they are used: a refusal says which one is wrong, and how."""

import re
import ssl
from pathlib import Path

import uvicorn

from configs.settings import Settings, flag
from engine import StartupError

KINDS = {
    "certificate": re.compile(rb"-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----"),
    "private key": re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----"),
}
"""What a file in PEM may hold -> how that begins."""
ENCRYPTED_KEY = b"ENCRYPTED"
"""Stands in the head of an encrypted private key, in both of PEM's forms for them."""
MISMATCHES = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""OpenSSL's reasons against a key of another certificate: of the same kind, of another kind."""


def load_certificates(config: uvicorn.Config, settings: Settings) -> None:
    """Raises `StartupError` where a file of --ssl-* cannot be read or used."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
        if certificate is None and getattr(settings, name) is not None:
            raise StartupError(f"{flag(name)} needs --ssl-certfile.")
    if certificate is not None:
        chain = _File("ssl_certfile", certificate)
        own_key = chain if key is None else _File("ssl_keyfile", key)
        chain.must_hold("certificate")
        own_key.must_hold("private key", "; give --ssl-keyfile" if own_key is chain else "")
        chain.check_certificates()
        _check_key(chain, own_key, settings.ssl_keyfile_password)
    if settings.ssl_ca_certs is not None:
        authorities = _File("ssl_ca_certs", settings.ssl_ca_certs)
        authorities.must_hold("certificate")
        authorities.check_certificates()
    config.load()


class _File:
    def __init__(self, name: str, path: str) -> None:
        """name: of the setting."""
        self.path, self.words = path, f"{flag(name)} {path}"
        try:
            self.content = Path(path).read_bytes()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise StartupError(f"{self.words} cannot be read: {reason}.") from None

    @property
    def is_encrypted(self) -> bool:
        return ENCRYPTED_KEY in self.content

    def must_hold(self, kind: str, cure: str = "") -> None:
        if not KINDS[kind].search(self.content):
            others = [other for other, begin in KINDS.items() if begin.search(self.content)]
            instead = f", but a {others[0]}" if others else ""
            raise StartupError(f"{self.words} holds no {kind} in PEM{instead}{cure}.")

    def check_certificates(self) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(self.path)
        except ssl.SSLError:
            raise StartupError(f"{self.words} is damaged: a certificate in it cannot be read.") from None


def _check_key(chain: _File, key: _File, password: str | None) -> None:
    """Whether the key can be read, and belongs to the certificate."""
    if key.is_encrypted and password is None:  # OpenSSL would ask for it at the terminal, and wait
        raise StartupError(f"{key.words} is encrypted: give --ssl-keyfile-password.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain.path, key.path, password)
    except ValueError as error:  # one that is too long; the sentence does not show it
        raise StartupError(f"--ssl-keyfile-password cannot be used: {error}.") from None
    except ssl.SSLError as error:
        if error.reason in MISMATCHES:
            words = f"{key.words} holds the key of another certificate than that in {chain.words}"
        elif error.reason:
            words = f"{chain.words} cannot be used: {error.reason.lower().replace('_', ' ')}"
        elif key.is_encrypted:
            words = f"--ssl-keyfile-password is not the password of {key.words}, or that file is damaged"
        else:
            words = f"{key.words} is damaged: the private key in it cannot be read"
        raise StartupError(f"{words}.") from None
