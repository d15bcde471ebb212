"""guidellm: it validates the server, finds the model by itself, and every request is answered in full."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from served import Load, Served

pytestmark = pytest.mark.e2e

REQUESTS = 30
TOKENS = 16


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(
    route: str,
    smollm2: Served,
    tokenizer: Path,
    environment: Callable[..., Path],
    run: Callable[..., str],
    tmp_path: Path,
) -> None:
    before = smollm2.counts()
    run(
        environment("guidellm", "guidellm~=0.8.1") / "guidellm", "run",
        "--backend", f"kind=openai_http,target={smollm2.url},request_format={route}",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={TOKENS}",
        "--output", f"kind=json,path={tmp_path / 'out.json'}", "--disable-progress",
    )  # fmt: skip
    load = Load(before, smollm2.counts())
    [benchmark] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    answered = benchmark["requests"]["successful"]
    assert benchmark["requests"]["errored"] == benchmark["requests"]["incomplete"] == []
    assert benchmark["scheduler_state"]["created_requests"] == REQUESTS
    assert len(answered) in (REQUESTS - 1, REQUESTS), "0.8.1 may end before it has counted the last answer"
    assert all(request["output_metrics"]["text_tokens"] == TOKENS for request in answered)
    prompts = int(load.added("vllm:prompt_tokens_total"))
    assert prompts >= sum(request["input_metrics"]["text_tokens"] for request in answered) > 0
    load.check(REQUESTS, REQUESTS * TOKENS, prompts)
