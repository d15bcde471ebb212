"""A container's health check: exit code 0 while the server is ready, 1 while it is not. The image has no curl.

    python -m server.healthcheck

It looks where the variables (`OCTAVO_PORT`, …) and the YAML file say that the server listens; flags it cannot see. A
full queue is healthy: an orchestrator that replaced a busy server would only make more work for the others.
"""

import http.client
import ssl
import sys

from configs.errors import StartupError
from configs.load import load
from configs.settings import Settings

TIMEOUT_SECONDS = 5.0


def main() -> int:
    """0 or 1; one line on stdout says why, for `docker inspect`."""
    try:
        connection = _connection(load([]).settings)
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
    except (StartupError, OSError, http.client.HTTPException) as error:
        print(f"no answer: {error or type(error).__name__}")
        return 1
    print(f"{answer.status} {body}")
    return 0 if answer.status == 200 or '"phase":"overloaded"' in body else 1


def _connection(settings: Settings) -> http.client.HTTPConnection:
    """With --ssl-certfile by HTTPS, the certificate unchecked: it is made out for the name that clients use."""
    if settings.ssl_certfile is None:
        return http.client.HTTPConnection("127.0.0.1", settings.port, timeout=TIMEOUT_SECONDS)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", settings.port, timeout=TIMEOUT_SECONDS, context=context)


if __name__ == "__main__":
    sys.exit(main())
