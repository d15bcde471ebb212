"""The one shape that every refusal has."""

from typing import Any

import httpx2


def assert_refused(
    response: httpx2.Response, status: int = 400, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The error of the envelope. `param`: the beginning of its `param`."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert isinstance(error["message"], str) and {"type", "param", "code"} <= error.keys(), error
    usual = "invalid_request_error" if status < 500 else "server_error"
    assert error["type"] == ("permission_error" if status == 403 else usual), error
    assert "Traceback" not in response.text
    if param is not None:
        assert error["param"] is not None and error["param"].startswith(param), error
    if code is not None:
        assert error["code"] == code, error
    return error
