"""Other servers' names of what a request here says in another word, or cannot say: refused by name, since a client that
sends one counts on it. Unknown fields are ignored, so without these tables the answer would silently be another one."""

from typing import Any

from server.protocol.body import Body
from server.protocol.refused import EMPTY, NOTHING, Unsupported

_ZERO: tuple[Any, ...] = (0,)
_ONE: tuple[Any, ...] = (1,)
_UNLIMITED: tuple[Any, ...] = (-1,)
_LIMIT = "here it is max_tokens, of which no more than fits is taken"
_NO_GRAMMARS = "is not supported: this server does not constrain its output yet"
_NO_SUCH_SAMPLER = "is not supported: temperature, top_p, top_k, min_p and the penalties are"


def _limits(harmless: tuple[Any, ...]) -> tuple[Unsupported, ...]:
    return (
        Unsupported(
            "n_predict", harmless, "is llama.cpp's name: here it is max_tokens, of which no more than fits is taken"
        ),
        Unsupported(
            "num_predict", harmless, "is Ollama's name: here it is max_tokens, of which no more than fits is taken"
        ),
        Unsupported("max_new_tokens", NOTHING, "is the name of transformers: here it is max_tokens"),
        Unsupported("max_output_tokens", NOTHING, "is for another API: here it is max_tokens"),
    )


_COMMON = (
    Unsupported("repeat_penalty", _ONE, "is the name of llama.cpp and Ollama: here it is repetition_penalty"),
    Unsupported("rep_pen", _ONE, "is KoboldAI's name: here it is repetition_penalty"),
    Unsupported("min_new_tokens", _ZERO, "is the name of transformers: here it is min_tokens"),
    Unsupported("max_length", NOTHING, "is the name of transformers: here max_tokens counts the answer alone"),
    Unsupported("min_length", _ZERO, "is the name of transformers: here min_tokens counts the answer alone"),
    Unsupported("num_return_sequences", _ONE, "is the name of transformers: here it is n"),
    Unsupported("eos_token_id", NOTHING, "is the name of transformers: here it is stop_token_ids"),
    Unsupported("bad_words_ids", EMPTY, "is the name of transformers: here it is bad_words, in text"),
    Unsupported("n_probs", _ZERO, "is llama.cpp's name: here it is logprobs"),
    Unsupported("options", EMPTY, "is Ollama's: here what is in it stands beside it"),
    Unsupported("do_sample", (True,), "is the name of transformers: here temperature 0 chooses the likeliest tokens"),
    Unsupported("stop_sequences", EMPTY, "is Anthropic's name: here it is stop"),
    Unsupported("stopping_strings", EMPTY, "is text-generation-webui's name: here it is stop"),
    Unsupported("num_beams", _ONE, _NO_SUCH_SAMPLER),
    Unsupported("length_penalty", _ONE, _NO_SUCH_SAMPLER),
    Unsupported("penalty_alpha", _ZERO, _NO_SUCH_SAMPLER),
    Unsupported("samplers", EMPTY, _NO_SUCH_SAMPLER),
    Unsupported("logits_processors", EMPTY, _NO_SUCH_SAMPLER),
    Unsupported("typical", _ONE, _NO_SUCH_SAMPLER),
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
    Unsupported("format", EMPTY, _NO_GRAMMARS),
    Unsupported("structural_tag", NOTHING, _NO_GRAMMARS),
    Unsupported("stop_regex", EMPTY, "is not supported: stop is a text or a list of texts"),
    Unsupported("thinking_token_budget", NOTHING, "is not supported: max_tokens counts thinking and answer together"),
)
FOREIGN_IN_CHAT = (
    *_COMMON,
    *_limits(_UNLIMITED),  # a chat without a limit runs to the window
)
FOREIGN_IN_COMPLETION = (*_COMMON, *_limits(NOTHING))


class ForeignFields(Body):
    """Of both routes."""

    n_predict: Any = None
    num_predict: Any = None
    max_new_tokens: Any = None
    max_output_tokens: Any = None
    repeat_penalty: Any = None
    rep_pen: Any = None
    min_new_tokens: Any = None
    max_length: Any = None
    min_length: Any = None
    num_return_sequences: Any = None
    eos_token_id: Any = None
    bad_words_ids: Any = None
    n_probs: Any = None
    options: Any = None
    do_sample: Any = None
    stop_sequences: Any = None
    stopping_strings: Any = None
    num_beams: Any = None
    length_penalty: Any = None
    penalty_alpha: Any = None
    samplers: Any = None
    logits_processors: Any = None
    typical: Any = None
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
    format: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    thinking_token_budget: Any = None
