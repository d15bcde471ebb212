"""What the planner asks of a model alone: among how many GPUs its heads can be split, and whether it is one at all."""

import json
from pathlib import Path

import published_models
import pytest

from configs.errors import StartupError
from configs.model import GenerationDefaults
from configs.plan_model import check_plausible, even_splits
from configs.probed import LayerCall, ProbedConfig
from configs.supported import read_model


def test_layers_of_other_heads_must_be_split_too() -> None:
    def of(*heads: tuple[int, int]) -> ProbedConfig:
        calls = tuple(LayerCall(layer, query, kv, 64, None) for layer, (query, kv) in enumerate(heads))
        return ProbedConfig("X", 1000, None, GenerationDefaults(), (4096, 4096), calls, 10**6, 0)

    assert even_splits(of((8, 8))) == even_splits(of((8, 8), (16, 2))) == (1, 2, 4, 8)
    assert even_splits(of((12, 4))) == (1, 2, 4, 12) and even_splits(of((12, 4), (8, 1))) == (1, 2, 4)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_key_value_heads": 64}, "num_key_value_heads must be a divisor of the 32 attention heads, got 64"),
        ({"hidden_size": -4096}, "hidden_size must be an integer of at least 1, got -4096"),
        ({"hidden_size": 640 * 10**9}, "hidden_size must be at most"),
        ({"hidden_size": 10**6}, "hidden_size is 1000000, and no model has more than 131072"),
        ({"head_dim": 4096}, "head_dim is 4096, and no model has more than 1024"),
        ({"head_dim": 1024, "hidden_size": 256}, "32 attention heads of 1024 numbers are 32768 beside a hidden_size"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000"),
        ({"num_hidden_layers": 10**6}, "1000000 layers are too many"),
        (
            {"intermediate_size": 2**20, "hidden_size": 2**17, "head_dim": 128, "num_hidden_layers": 4096},
            "parameters, and no model has",
        ),
    ],
)  # fmt: skip
def test_640_gb_of_nothing_is_an_error(changed: dict[str, object], words: str, tmp_path: Path) -> None:
    config = {**published_models.OURS["Llama-2-7B"], **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError) as caught:
        check_plausible(read_model(tmp_path), tmp_path)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"--model: {tmp_path}/config.json") and words in message
    assert message.endswith(".") and "\n" not in message
