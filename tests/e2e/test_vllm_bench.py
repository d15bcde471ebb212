"""`vllm bench serve` takes this server for a vLLM."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from served import Load, Served

REQUESTS = 30
TOKENS = 16
PROMPT = 64
VLLM = os.environ.get("OCTAVO_E2E_VLLM", "")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not VLLM, reason="OCTAVO_E2E_VLLM does not name a vllm command"),
]


@pytest.mark.parametrize(
    "backend, route", [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")], ids=["text", "chat"]
)
def test_vllm_bench(
    backend: str, route: str, smollm2: Served, tokenizer: Path, run: Callable[..., str], tmp_path: Path
) -> None:
    before = smollm2.counts()
    run(
        VLLM, "bench", "serve", "--backend", backend, "--endpoint", route, "--base-url", smollm2.url,
        "--model", "SmolLM2-135M-Instruct", "--tokenizer", tokenizer,
        "--dataset-name", "random", "--random-input-len", PROMPT, "--random-output-len", TOKENS, "--ignore-eos",
        "--num-prompts", REQUESTS, "--max-concurrency", 4, "--disable-tqdm", "--ready-check-timeout-sec", 0,
        "--save-result", "--result-dir", tmp_path, "--result-filename", "out.json",
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip
    load = Load(before, smollm2.counts())
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["completed"], report["failed"]) == (REQUESTS, 0)
    assert report["total_output_tokens"] == REQUESTS * TOKENS
    assert report["total_input_tokens"] >= REQUESTS * PROMPT
    load.check(REQUESTS, REQUESTS * TOKENS, report["total_input_tokens"])
