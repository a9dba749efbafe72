"""Chat templates and tokenizers against transformers on the same folder, token for token."""

from pathlib import Path

import jinja2
import pytest
from jinja2.defaults import DEFAULT_FILTERS
from transformers import AutoTokenizer

from engine.errors import InvalidRequestError, UnsupportedModelError
from serve_app.text.base_text import BaseText
from serve_app.text.template import ChatTemplate
from serve_app.text.template_guard import TemplateBudgetError
from tests.text_factory import MISTRAL, SMOLLM, TEMPLATES, base_text, write_folder

CHATS: dict[str, list[dict[str, str]]] = {
    "one": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hello <b>&amp;</b> 👩‍👩‍👧‍👦"},
    ],
    "turns": [
        {"role": "user", "content": "a\n"},
        {"role": "assistant", "content": "<think>x</think>\n\n b "},
        {"role": "user", "content": "c <|im_end|> ไทย"},
    ],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_is_encoded_as_transformers_does(
    tmp_path: Path, name: str, chat: str, add_generation_prompt: bool
) -> None:
    folder = write_folder(tmp_path, TEMPLATES[name])
    oracle = AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(
        CHATS[chat], add_generation_prompt=add_generation_prompt, tokenize=False
    )
    text = BaseText.from_folder(folder)
    rendered = text.render_chat(CHATS[chat], add_generation_prompt=add_generation_prompt)
    assert rendered == expected
    ids = oracle.apply_chat_template(
        CHATS[chat], add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert text.encode(rendered, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", ["smollm", "llama3", "qwen3"])
@pytest.mark.parametrize("content", ["The answer is", "The answer is  "])
def test_final_message_is_continued_as_transformers_does(
    tmp_path: Path, name: str, content: str
) -> None:
    chat = [*CHATS["one"], {"role": "assistant", "content": content}]
    folder = write_folder(tmp_path, TEMPLATES[name])
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, continue_final_message=True, tokenize=False
    )
    text = BaseText.from_folder(folder)
    ours = text.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert ours == expected


def test_template_variables_reach_the_template(tmp_path: Path) -> None:
    text = base_text(tmp_path, TEMPLATES["qwen3"])
    assert text.render_chat(CHATS["one"], variables={"enable_thinking": False}).endswith(
        "<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("config_only", [True, False])
def test_plain_text_is_encoded_as_transformers_does(tmp_path: Path, config_only: bool) -> None:
    config = {"chat_template": [{"name": "default", "template": SMOLLM}]}
    folder = write_folder(tmp_path, None if config_only else SMOLLM, config)
    oracle = AutoTokenizer.from_pretrained(folder)
    text = BaseText.from_folder(folder)
    for value in ("Hello world", " naïve <|im_start|>x", "日本語 é x"):
        assert text.encode(value) == oracle(value)["input_ids"]
    assert text.render_chat(CHATS["one"]).startswith("<|im_start|>system")
    assert text.eos_token_ids == {1, 3}


def test_template_that_refuses_the_messages_is_the_clients_error(tmp_path: Path) -> None:
    text = base_text(tmp_path, MISTRAL)
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        text.render_chat(chat)
    assert caught.value.param == "messages"


def test_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        base_text(tmp_path, None).render_chat(CHATS["one"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ namespace(__init__=1) }}",
        "{% set big = 'x' * 100000000 %}",
        "{% set big = 10 ** 1000 %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ undefined.attribute }}",
        "{{ messages[7].content }}",
        "{{ 1 + 'a' }}",
        "{{ 1e999 }}",  # compiled to the name inf
        "{{ '\\ud800' }}",  # no tokenizer takes it
    ],
)
def test_hostile_or_broken_template_only_fails_the_request(source: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequestError, match="chat template"):
        template.render(CHATS["one"])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999)|list %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(99) }}",
        *(
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}" + step + "{% endfor %}"
            for step in (
                "{% set ns.x = ns.x + ns.x %}",
                "{% set ns.x = ns.x ~ ns.x %}",
                "{% set ns.x = [ns.x, ns.x] | join %}",
                "{% set ns.x = ns.x.replace('b', ns.x) %}",
                "{% set ns.x = ns.x | replace('b', ns.x) %}",
                "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}",
            )
        ),
        *(
            "{% set ns = namespace(x=[9]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
            "{% endfor %}" + end
            for end in ("{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x == 1 }}")
        ),
        "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'a'.center(999999999) }}",
        "{{ 'a'.encode().ljust(999999999) }}",
        "{{ 'a'.zfill(999999999) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ ['a'] | map('center', 999999999) | list }}",
        "{% filter indent(999999999, true) %}a{% endfilter %}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ range(99999) | map('string') | join('abcdefgh' | string) }}",
        "{{ dict(*range(99999)) }}",
        "{% for i in range(9) | batch(999999999, 'x') %}{% endfor %}",
        "{{ 1.5 | round(300000000, 'floor') }}",
        "{{ 1 | round(-300000000) }}",
        "{{ [1] | map('round', precision=300000000, method='floor') | list }}",
        *(
            "{% set ns = namespace(x='a') %}{% set ns.a = ns %}"
            "{% for i in range(9000) %}" + step + "{% endfor %}"
            for step in (
                "{% set _ = [ns] | map(attribute='" + "a." * 9000 + "a') | list %}",
                "{% set _ = ['a'] | join(attribute='" + "0." * 9000 + "0') %}",
                ("{% set x = ns" + ".a" * 60 + " %}") * 40,
                "{% for j in [] %}{% else %}" + "{% set x = ns.a.a %}" * 400 + "{% endfor %}",
                "{% if i %}" + "{% set x = [i, i, i, i, i, i] %}" * 400 + "{% endif %}",
            )
        ),
        "{% macro f() %}" + "{% set x = [1, 2, 3, 4, 5, 6] %}" * 400 + "{% endmacro %}"
        "{% for i in range(9000) %}{{ f() }}{% endfor %}",
    ],
)
def test_a_template_cannot_hold_the_event_loop_or_fill_its_memory(source: str) -> None:
    template = ChatTemplate(source, {})  # the compiler runs no part of it
    with pytest.raises(TemplateBudgetError, match="chat template"):
        template.render(CHATS["one"])


@pytest.mark.parametrize(
    "end",
    [
        "{{ {ns.x: 1} }}",
        "{{ {1: 2}[ns.x] }}",
        "{{ ns.x is filter }}",
        "{{ ns.x is test }}",
        "{{ [1] | map(ns.x) | list }}",
        "{{ [1] | selectattr('real', ns.x) | list }}",
    ],
)
def test_a_deep_tuple_is_not_hashed_which_would_overflow_the_stack(end: str) -> None:
    step = "{% set ns.x = " + "(" * 30 + "ns.x" + ",)" * 30 + " %}"
    loop = "{% set ns = namespace(x=1) %}{% for i in range(12000) %}" + step + "{% endfor %}"
    chat = [{"role": "user", "content": "x" * 100_000}]  # pays for the loop
    with pytest.raises(InvalidRequestError, match=r"chat template.*recursion"):
        ChatTemplate(loop + end, {}).render(chat)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_usual_templates_stay_within_the_budget_of_the_event_loop(name: str) -> None:
    turns = ({"role": role, "content": "some words"} for role in ("user", "assistant") * 200)
    chat = [*turns, *CHATS["one"]]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected = ChatTemplate(TEMPLATES[name], tokens, is_guarded=False).render(chat)
    assert ChatTemplate(TEMPLATES[name], tokens).render(chat) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in %}",
        "{% break %}",
        "{% for x in messages %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
        "{{ " + "1" * 5000 + " }}",
        "{% macro f(a, a) %}{% endmacro %}",
    ],
)
def test_template_that_does_not_compile_is_refused_at_load(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match="chat template"):
        ChatTemplate(source, {})


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_compiler_runs_no_filter(is_guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setitem(DEFAULT_FILTERS, "length", lambda value: calls.append(value) or 1)
    template = ChatTemplate("{{ 'abc' | length }}{{ 2 }}", {}, is_guarded=is_guarded)
    assert calls == []
    assert template.render(CHATS["one"]) == "12"
    assert calls == ["abc"]
    with pytest.raises(UnsupportedModelError, match="autoescape takes true or false"):
        ChatTemplate(
            "{% autoescape 'abc' | length %}{% endautoescape %}", {}, is_guarded=is_guarded
        )
    assert calls == ["abc"]


def test_a_reason_that_a_template_gives_is_cut_and_can_be_sent() -> None:
    template = ChatTemplate("{{ raise_exception('\\ud800' ~ messages[0].content) }}", {})
    with pytest.raises(InvalidRequestError) as caught:
        template.render([{"role": "user", "content": "x" * 10_000}])
    assert "\\ud800xxx" in caught.value.message
    assert len(caught.value.message.encode()) < 1000


def test_messages_of_the_caller_are_left_alone() -> None:
    chat = [{"role": "user", "content": "a"}]
    ChatTemplate("{{ messages[0].content }}", {}).render(chat, continue_final_message=True)
    assert chat == [{"role": "user", "content": "a"}]


def test_jinja_is_new_enough_for_the_sandbox() -> None:
    assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= (3, 1, 6)


@pytest.mark.parametrize(
    "read",
    ["message.thinking", "message['reasoning']", "message.get('thinking')", "message.reasoning"],
)
def test_reasoning_has_the_name_that_the_template_reads(read: str) -> None:
    template = ChatTemplate("{% for message in messages %}<{{ " + read + " }}>{% endfor %}", {})
    chat = [
        {"role": "assistant", "content": "b", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "b", "reasoning_content": "", "thinking": "own"},
    ]
    assert template.render(chat).startswith("<Hm.>")
    assert "thinking" not in chat[0]


def test_calls_with_a_content_are_rendered_without_thinking() -> None:
    source = "{% if messages[0].thinking %}{{ raise_exception('both') }}{% endif %}calls"
    turn = {"role": "assistant", "content": "b", "reasoning_content": "Hm.", "tool_calls": [{}]}
    template = ChatTemplate(source, {})
    assert template.render([turn]) == "calls"
    with pytest.raises(InvalidRequestError, match="both"):
        template.render([turn | {"content": ""}])


def test_messages_have_no_names_that_the_template_does_not_read() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}", {})
    chat = [{"role": "assistant", "content": "b", "reasoning_content": "Hm."}]
    assert "thinking" not in template.render(chat)
