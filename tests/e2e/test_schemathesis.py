"""schemathesis reads /openapi.json and tries what it says, and what it rules out: no 5xx, and the document tells the
truth about statuses, content types, answers, refusals and keys."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
from served import Load, serving

pytestmark = pytest.mark.e2e

EXAMPLES = 1000
SERVED = 100
"""Requests that must have reached the model, of each kind: the rest is refused, and finds little."""
RULES = "positive_data_acceptance"
"""Not asked for: which fields go together, a document cannot say."""
KEY, ADMIN_KEY = "e2e-key", "e2e-admin-key"


def test_schemathesis(environment: Callable[..., Path], run: Callable[..., str], tmp_path: Path) -> None:
    model = tiny_models.build(tmp_path / "tiny")
    arguments = (
        "--served-model-name", "tiny", "--num-threads", "1", "--num-gpu-blocks-override", "256",
        "--max-model-len", "128", "--api-key", KEY, "--admin-api-key", ADMIN_KEY,
    )  # fmt: skip
    with serving(tmp_path, str(model), *arguments) as served:
        before = served.counts()
        run(
            environment("schemathesis", "schemathesis~=4.32") / "schemathesis", "run", f"{served.url}/openapi.json",
            "--header", f"Authorization: Bearer {ADMIN_KEY}", "--checks", "all", "--exclude-checks", RULES,
            "--max-examples", 30, "--seed", 1,
            "--continue-on-failure", "--no-color", "--request-timeout", 120, "--generation-database", "none",
            "--report-json-path", tmp_path / "report.json",
            SCHEMATHESIS_HOOKS="schemathesis_hooks", PYTHONPATH=str(Path(__file__).parent),
        )  # fmt: skip
        load = Load(before, served.counts())
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["test_cases"]["generated"] >= EXAMPLES and not report["failures"] and not report["errors"]
    for route in ("/v1/chat/completions", "/v1/completions"):
        assert load.added("http_requests_total", f"handler={route}", "method=POST", "status=2xx") >= SERVED
    assert not [name for name in load.after if "status=5xx" in name]
