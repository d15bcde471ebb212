"""Other servers' names of what a request here says in another word, or cannot say: refused by name, since a client that
sends one counts on it. Unknown fields are ignored, so without these tables the answer would silently be another one."""

from typing import Any

from server.protocol.body import Body
from server.protocol.refused import EMPTY, NOTHING, Unsupported

_ZERO: tuple[Any, ...] = (0,)
_ONE: tuple[Any, ...] = (1,)
_UNLIMITED: tuple[Any, ...] = (-1,)
_NO_GRAMMARS = "is not supported: this server does not constrain its output yet"
_NO_SUCH_SAMPLER = "is not supported: temperature, top_p, top_k, min_p and the penalties are"


def _limits(harmless: tuple[Any, ...]) -> tuple[Unsupported, ...]:
    return (
        Unsupported("n_predict", harmless, "is llama.cpp's name: here it is max_tokens"),
        Unsupported("num_predict", harmless, "is Ollama's name: here it is max_tokens"),
        Unsupported("max_new_tokens", NOTHING, "is the name of transformers: here it is max_tokens"),
        Unsupported("max_output_tokens", NOTHING, "is for another API: here it is max_tokens"),
    )


_COMMON = (
    Unsupported("repeat_penalty", _ONE, "is llama.cpp's name: here it is repetition_penalty"),
    Unsupported("min_new_tokens", _ZERO, "is the name of transformers: here it is min_tokens"),
    Unsupported("do_sample", (True,), "is the name of transformers: here temperature 0 chooses the likeliest tokens"),
    Unsupported("stop_sequences", EMPTY, "is Anthropic's name: here it is stop"),
    Unsupported("typical_p", _ONE, _NO_SUCH_SAMPLER),
    Unsupported("tfs_z", _ONE, _NO_SUCH_SAMPLER),
    Unsupported("top_a", _ZERO, _NO_SUCH_SAMPLER),
    Unsupported("top_n_sigma", (0, -1), _NO_SUCH_SAMPLER),
    Unsupported("mirostat", _ZERO, _NO_SUCH_SAMPLER),
    Unsupported("dynatemp_range", _ZERO, _NO_SUCH_SAMPLER),
    Unsupported("xtc_probability", _ZERO, _NO_SUCH_SAMPLER),
    Unsupported("dry_multiplier", _ZERO, _NO_SUCH_SAMPLER),
    Unsupported("no_repeat_ngram_size", _ZERO, _NO_SUCH_SAMPLER),
    Unsupported("grammar", EMPTY, _NO_GRAMMARS),
    Unsupported("json_schema", NOTHING, _NO_GRAMMARS),
    Unsupported("regex", NOTHING, _NO_GRAMMARS),
    Unsupported("ebnf", NOTHING, _NO_GRAMMARS),
)
FOREIGN_IN_CHAT = (
    *_COMMON,
    *_limits(_UNLIMITED),  # a chat without a limit runs to the window
    Unsupported("enable_thinking", NOTHING, "belongs into chat_template_kwargs, where the model's template knows it"),
)
FOREIGN_IN_COMPLETION = (*_COMMON, *_limits(NOTHING))


class ForeignFields(Body):
    """Of both routes."""

    repeat_penalty: Any = None
    n_predict: Any = None
    num_predict: Any = None
    max_new_tokens: Any = None
    max_output_tokens: Any = None
    min_new_tokens: Any = None
    do_sample: Any = None
    stop_sequences: Any = None
    typical_p: Any = None
    tfs_z: Any = None
    top_a: Any = None
    top_n_sigma: Any = None
    mirostat: Any = None
    dynatemp_range: Any = None
    xtc_probability: Any = None
    dry_multiplier: Any = None
    no_repeat_ngram_size: Any = None
    grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
