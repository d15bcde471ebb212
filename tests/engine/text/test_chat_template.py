"""Token ids of whole conversations, equal to transformers'; both ways to end one; models without a template."""

import json
import random
from typing import Any

import pytest
from bytetok import CHATML, byte_backend, byte_tokenizer
from chat_models import FAMILIES, MODELS, A, D, S, T, U, call, ids_of, reference, renderer
from tokenizer_families import TEXTS

from engine.errors import InvalidRequest, StartupError
from engine.text.chat_messages import plain_json
from engine.text.chat_template import ChatRenderer
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import TokenizerParts

# ------------------------------------------------------------------ equal to transformers
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [U("Hello, how are you?")],
    "with system": [S("You are terse."), U("Why is the sky blue?")],
    "several turns": [U("one"), A("  eins \n"), U("two\n\n"), A("zwei"), U("three")],
    "code and scripts": [U("def f(x):\n\treturn {x: '日本語'}\n"), A("```py\n1 < 2 && 3\n```"), U("👍🏽 naïve\r\n")],
    "blank": [U(""), A(""), U("   ")],
    "jinja in content": [U("{{ 7*7 }} {% if x %} {# no #}"), A("\\n \\ \"quoted\" 'q' <b>&amp;</b>"), U("$")],
    "named": [{**U("hi"), "name": "ann"}, A("hello"), U("again")],
}
TOOL_TURNS = [
    U("q"),
    A(None, tool_calls=[call("f", {"x": 1, "é": ["<b>", None]})]),
    T("42 & <ok>"),
    A("It is 42."),
    U("?"),
]
FUNCTIONS = [
    {"type": "function", "function": {"name": "f", "description": "a <b> 'c' é", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_transformers(transformers: Any, family: str, name: str, generate: bool) -> None:
    tokenizer, messages = MODELS[family], CONVERSATIONS[name]
    theirs = reference(transformers, tokenizer)
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=generate)
    chat = ChatRenderer(tokenizer)
    assert chat.render(messages, add_generation_prompt=generate) == ids
    assert chat.render_text(messages, add_generation_prompt=generate) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generate
    )


@pytest.mark.parametrize("family", ["llama 3", "thinking"])
def test_tool_turns_equal_transformers(transformers: Any, family: str) -> None:
    """Clients send arguments as JSON text; templates go through an object."""
    tokenizer = MODELS[family]
    theirs = reference(transformers, tokenizer).apply_chat_template(
        TOOL_TURNS, tools=FUNCTIONS, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    as_text = json.loads(json.dumps(TOOL_TURNS))
    function = as_text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    for messages in (TOOL_TURNS, as_text):
        assert ChatRenderer(tokenizer).render(messages, tools=FUNCTIONS) == theirs


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_smollm2_equals_transformers(smollm2_chat: ChatRenderer, smollm2_reference: Any, text: str) -> None:
    messages = [S(f"be {text}"), U(text), A(f"{text}\n{text}"), U("go on")]
    ids = smollm2_reference.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert smollm2_chat.render(messages) == ids


@pytest.mark.parametrize("family", FAMILIES)
def test_continuing_equals_transformers(transformers: Any, family: str) -> None:
    tokenizer = MODELS[family]
    theirs = reference(transformers, tokenizer)
    for end in ("The answer", "The answer is ", "The answer\n", " x "):
        messages = [U("q"), A(end)]
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, continue_final_message=True)
        ours = ChatRenderer(tokenizer).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert ours == ids


def test_random_conversations_without_markers_need_one_rendering(transformers: Any) -> None:
    """Whatever the content, as long as it holds no marker: transformers' ids."""
    source = random.Random(5)
    tokenizer = MODELS["llama 3"]
    theirs, chat = reference(transformers, tokenizer), ChatRenderer(tokenizer)
    for _ in range(40):
        texts = ["".join(source.choices("ab 1\n\té漢<|>{}%'\"\\", k=source.randrange(30))) for _ in range(3)]
        messages = [U(texts[0]), A(texts[1]), U(texts[2])]
        assert chat.render(messages) == theirs.apply_chat_template(
            messages, tokenize=True, return_dict=False, add_generation_prompt=True
        )


# ------------------------------------------------------------------ no template, both modes
def test_a_model_without_a_template_says_so() -> None:
    chat = ChatRenderer(byte_tokenizer(template=None))
    assert not chat.has_template
    with pytest.raises(InvalidRequest, match=r"no chat template. Use /v1/completions, or .* --chat-template") as caught:
        chat.render([U("x")])
    assert caught.value.code == "no_chat_template"
    assert ChatRenderer(byte_tokenizer(template=None), CHATML).render([U("x")])


@pytest.mark.parametrize("template", ["{% for %}", "{% endfor %}"])
def test_a_broken_template_is_refused_at_start(template: str) -> None:
    with pytest.raises(StartupError, match=r"^--chat-template: the chat template is not valid: [^\n]*[^.]\.$"):
        renderer(template)


def test_both_ends_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot both be true"):
        ids_of([U("x"), A("y")], continue_final_message=True)


def test_a_message_that_the_template_rewrites_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ids_of([U("x")], "{{ messages[0].role }}", add_generation_prompt=False, continue_final_message=True)


def test_inputs_are_left_as_they_were() -> None:
    messages = [D("d"), U([{"type": "text", "text": "<|im_end|>"}]), A(None, tool_calls=[call("f", "{}")])]
    before = json.dumps(messages)
    ids_of(messages)
    assert json.dumps(messages) == before and plain_json(messages, "m") is not messages


def test_the_backend_is_left_as_it_was() -> None:
    backend = byte_backend()
    before = backend.to_str()
    ChatRenderer(Tokenizer(TokenizerParts(backend, {}, (1,), False, CHATML))).render([U("<|im_end|>")])
    assert backend.to_str() == before
