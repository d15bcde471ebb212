import warnings
from typing import Any

import pytest
from smollm2 import smollm2_gguf

from engine.source import ModelSource
from engine.text.chat_template import ChatRenderer
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return Tokenizer.load(ModelSource(smollm2_gguf(), "SmolLM2", "test"))


@pytest.fixture(scope="session")
def smollm2_chat(smollm2: Tokenizer) -> ChatRenderer:
    return ChatRenderer(smollm2)


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The library itself: the oracle. Its warnings are its own business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return transformers


@pytest.fixture(scope="session")
def smollm2_reference(transformers: Any) -> Any:
    """transformers' tokenizer from the same file, with the digits pre-tokenizer that the file only names."""
    from tokenizers import pre_tokenizers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        architecture, vocabulary, config = get_gguf_tokenizer(str(smollm2_gguf()))
        backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **config)
