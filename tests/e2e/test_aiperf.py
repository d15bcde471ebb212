"""NVIDIA's aiperf: every request is answered in full, and it finds the server's metrics by the names it knows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from served import Load, Served

pytestmark = pytest.mark.e2e

REQUESTS = 30
TOKENS = 16
KNOWN_METRICS = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
)


@pytest.mark.parametrize("endpoint", [("chat", "--streaming"), ("completions",)], ids=lambda endpoint: endpoint[0])
def test_aiperf(
    endpoint: tuple[str, ...],
    smollm2: Served,
    tokenizer: Path,
    environment: Callable[..., Path],
    run: Callable[..., str],
    tmp_path: Path,
) -> None:
    before = smollm2.counts()
    run(
        environment("aiperf", "aiperf~=0.13.0") / "aiperf", "profile",
        "--model", "SmolLM2-135M-Instruct", "--tokenizer", tokenizer,
        "--url", smollm2.url, "--endpoint-type", *endpoint,
        "--request-count", REQUESTS, "--concurrency", 4, "--random-seed", 1,
        "--isl", 64, "--osl", TOKENS,
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{TOKENS}",
        "--use-server-token-count", "--ui", "none", "--artifact-dir", tmp_path / "out",
    )  # fmt: skip
    load = Load(before, smollm2.counts())
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert not report["was_cancelled"] and not report["error_summary"] and "error_request_count" not in report
    assert report["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    load.check(REQUESTS, REQUESTS * TOKENS, int(report["total_usage_prompt_tokens"]["avg"]))
    exported = (tmp_path / "out" / "server_metrics_export.json").read_text()
    assert [name for name in KNOWN_METRICS if name not in exported] == []
