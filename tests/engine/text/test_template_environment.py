"""What templates may use, as in transformers; what they may not; the arguments that clients give them (A38)."""

from typing import Any

import pytest
from bytetok import CONTROL
from chat_models import MODELS, A, U, ids_of, rendered, renderer

from engine.errors import InvalidRequest, StartupError
from engine.text.chat_template import MAX_RENDERED_CHARS, ChatRenderer

TEMPLATE_FEATURES = [
    "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
    "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{% for i in 'abcd' %}{% if i == 'b' %}{% continue %}{% elif i == 'd' %}{% break %}{% endif %}.{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% set d = dict(a=1) %}{{ d.a }}{{ dict.fromkeys(['x'], 2) }}",
    "a\n  {% if true %}\n  b\n  {% endif %}\nc {%- generation %} g {% endgeneration -%} d\n",
    "{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}",
    "{{ undefined_thing }}|{{ messages[0].nothing }}|{{ tools }}|{{ documents }}|{{ add_generation_prompt }}",
    "{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}",
    "{{ strftime_now('%Y-%m') }}",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') }}{{ messages | map(attribute='role') | join(',') }}",
    "{{ '%s-%d' % ('a', 3) }}{{ 'x' * 3 }}{{ messages | length }}{{ messages[0]['content'][1:] }}",
]


@pytest.mark.parametrize("template", TEMPLATE_FEATURES)
def test_environment_equals_transformers(transformers: Any, template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [U("one <é>"), A("two")]
    [theirs], _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token=CONTROL[0], eos_token=CONTROL[1]
    )
    assert renderer(template).render_text(messages) == theirs


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].pop('role') }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ dict.__class__.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_templates_stay_in_the_sandbox(template: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        renderer(template).render([U("x")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
        "{{ messages | nothing }}",
        "{{ f() }}",
    ],
)
def test_a_failing_template_is_a_400(template: str) -> None:
    if "nothing" in template:
        with pytest.raises(StartupError, match="--chat-template"):
            renderer(template)
        return
    with pytest.raises(InvalidRequest, match="The model's chat template cannot render this conversation: "):
        renderer(template).render([U("x")])


# ------------------------------------------------------------------ A38: template arguments
@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "bos_token", "eos_token", "pad_token",
     "__class__", "_x", "a b", "", "raise_exception", "namespace", "range", "self", "continue_final_message"],
)  # fmt: skip
def test_a38_template_arguments_cannot_shadow_ours(name: str) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs must not set") as caught:
        ids_of([U("x")], template_kwargs={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_a38_other_template_arguments_pass() -> None:
    chat = ChatRenderer(MODELS["thinking"])
    text = chat.render_text([U("x")], template_kwargs={"enable_thinking": False, "unknown": {"a": [1]}})
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(InvalidRequest, match="is not JSON"):
        chat.render([U("x")], template_kwargs={"unknown": object()})


def test_a38_content_is_data() -> None:
    assert "{{ 7*7 }}" in rendered([U("{{ 7*7 }}")]) and "49" not in rendered([U("{{ 7*7 }}")])


def test_a38_output_is_bounded() -> None:
    bomb = (
        "{% if messages[0].content == 'go' %}{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 999 }}"
        "{% endfor %}{% endfor %}{% endif %}"
    )
    with pytest.raises(InvalidRequest, match=f"longer than {MAX_RENDERED_CHARS} characters"):
        renderer(bomb).render([U("go")])
