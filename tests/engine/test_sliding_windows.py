"""A model with sliding windows from its settings on: pools, start-up block, figures, answers."""

import pytest
import tiny_models

from engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPTS = [[(7 * place + number) % 256 for place in range(200 + number)] for number in range(3)]
COMMON = {"dtype": "float32", "max_model_len": 300, "max_num_seqs": 2, "max_num_batched_tokens": 32, "num_threads": 1}


@pytest.mark.parametrize(
    ("variant", "pools"),
    [
        (
            "gemma3",
            "80 pages of 16 tokens = 1280 tokens for 1 of 3 layers, which see everything and "
            "20 pages of 16 tokens = 320 tokens for 2 of 3 layers, which see 24 tokens",
        ),
        ("mistral-window", "80 pages of 16 tokens = 1280 tokens for 2 of 2 layers, which see 24 tokens"),
    ],
)
def test_a_model_with_windows(tmp_path_factory: pytest.TempPathFactory, variant: str, pools: str) -> None:
    folder = tiny_models.build(tmp_path_factory.mktemp(variant), tiny_models.VARIANTS[variant])
    llm = LLM(str(folder), num_gpu_blocks_override=80, **COMMON)
    assert llm.info.summary["KV pool"].startswith(pools)
    first = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]
    stats = llm.memory_stats()
    bytes_per_layer = {"gemma3": 2 * 16 * 1 * 32 * 4, "mistral-window": 2 * 16 * 2 * 16 * 4}[variant]
    layers, windowed = (1, 2) if variant == "gemma3" else (0, 2)
    pages = 20 if variant == "gemma3" else 80
    assert stats["total_bytes"] == padded(80 * layers * bytes_per_layer) + pages * padded(windowed * bytes_per_layer)
    again = llm.generate(PROMPTS, GREEDY)
    assert [result.outputs[0].token_ids for result in again] == first
    assert llm.memory_stats()["utilization"] == 0
    llm.shutdown()
    unwindowed = LLM(str(folder), num_gpu_blocks_override=2000, **{**COMMON, "max_num_batched_tokens": 300})
    assert [result.outputs[0].token_ids for result in unwindowed.generate(PROMPTS, GREEDY)] == first
    unwindowed.shutdown()


def padded(size: int) -> int:
    return -(-size // 4096) * 4096
