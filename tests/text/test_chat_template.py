"""Conversations become prompts by the chat template, and whatever cannot is refused with field, value and fix."""

import copy
import functools
import json

import pytest
from chats import ANSWER, BOS, MAX_LEN, TEMPLATE, chat_llm, chat_tokenizer

import jspec
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.text.chat_template import MAX_TEMPLATE, prompt_tokens

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def llm(tokenizer):
    return chat_llm(tokenizer)


@pytest.fixture
def text(tokenizer):
    """The prompt of a conversation as text."""

    def make(messages, **options) -> str:
        return tokenizer.decode(prompt_tokens(tokenizer, 4096, messages, **options))

    return make


# As templates of multimodal models are: for lists of parts alone, for these or texts, and for these in a message's object.
PARTS = (
    "{% for m in messages %}[{{ m.role }}:{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}]{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}>"
)


@pytest.mark.parametrize("template", [PARTS, EITHER])
def test_templates_that_go_through_the_parts_of_a_message(text, template):
    made = functools.partial(text, chat_template=template)
    assert made(HI) == "[user:hi]>"
    assert made([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == "[user:hi]>"
    talk = [{"role": "system", "content": "be"}, *HI, {"role": "assistant", "content": ""}]
    assert made(talk) == "[system:be][user:hi][assistant:]>"
    developer = [{"role": "developer", "content": "be"}, *HI]
    assert made(developer) == "[developer:be][user:hi]>"
    half = [*HI, {"role": "assistant", "content": "Well, "}]
    went_on = made(half, add_generation_prompt=False, continue_final_message=True)
    assert went_on.rstrip() == "[user:hi][assistant:Well,"
    with pytest.raises(ValueError, match=r"type='image_url': images, audio and files are not supported"):
        made([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_a_variable_of_the_template_switches_thinking(text):
    made = functools.partial(text, HI, chat_template=EITHER)
    assert made(template_kwargs={"enable_thinking": True}) == "[user:hi]<think>>"
    assert made(template_kwargs={"enable_thinking": False}) == made() == "[user:hi]>"


class Message:
    """As the OpenAI client returns one."""

    def model_dump(self):
        return {"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (HI, "[user:hi]"),
        (
            [{"role": "system", "content": "be"}, *HI, {"role": "assistant", "content": ""}],
            "[system:be][user:hi][assistant:]",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            "[user:a\nb]",
        ),
        ([{"role": "user", "content": []}], "[user:]"),
        ([{"role": "user", "content": "hi", "name": "Ada"}], "[Ada:hi]"),
        ([{"role": "tool", "content": "3", "tool_call_id": "c1"}], "[c1:3]"),
        ([{"role": "assistant", "content": "ok", "tool_calls": []}], "[assistant:ok]"),
        ([*HI, Message()], "[user:hi][assistant:yes]"),
        (tuple(HI), "[user:hi]"),
        (iter(HI), "[user:hi]"),
    ],
)
def test_messages_of_every_form_become_plain(text, messages, expected):
    assert text(messages) == f"<s>{expected}>"


@pytest.mark.parametrize(
    "call", [CALL, CALL["function"], CALL | {"function": CALL["function"] | {"arguments": {"a": [1, 2]}}}]
)
def test_arguments_of_a_tool_call_become_an_object(text, call):
    """With or without content, and whether they were JSON or an object."""
    for content in ({"content": None}, {}, {"content": "so"}):
        shown = text([*HI, {"role": "assistant", "tool_calls": [call], **content}])
        assert '"name": "add", "arguments": {"a": [1, 2]}' in shown
        assert shown.startswith(f"<s>[user:hi][assistant:{content.get('content') or ''}[")
    for nothing in (None, "", "null", " null "):
        assert '{"name": "now", "arguments": {}}' in text(
            [{"role": "assistant", "tool_calls": [{"name": "now", "arguments": nothing}]}]
        )


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "3", '"x"', "[" * 50, '{"a": NaN}'])
def test_arguments_that_are_no_object_stay_the_text_that_the_model_wrote(text, arguments):
    """A call that was cut, for example. It does not end the conversation."""
    messages = [*HI, {"role": "assistant", "tool_calls": [{"name": "now", "arguments": arguments}]}]
    assert json.dumps({"name": "now", "arguments": arguments}) in text(messages)
    through = "{% for name, value in messages[1].tool_calls[0].arguments.items() %}{{ name }}={{ value }}{% endfor %}"
    assert text(messages, chat_template=through) == f"arguments={arguments}"


def test_messages_of_the_caller_are_not_changed(text):
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [copy.deepcopy(CALL)]}]
    before = copy.deepcopy(messages)
    text(messages)
    text([*messages, *HI], tools=[{"name": "add"}])
    assert messages == before


def test_tokenizer_adds_no_second_bos_token(tokenizer):
    assert prompt_tokens(tokenizer, 64, HI).count(BOS) == 1
    assert BOS not in prompt_tokens(tokenizer, 64, HI, chat_template="{{ messages[0].content }}")


def add(a: int, b: int):
    """Add two numbers.

    Args:
      a: the first
      b: the second
    """
    return a + b


def test_template_gets_tools_documents_and_variables(text, tmp_path):
    assert text(HI, add_generation_prompt=False) == "<s>[user:hi]"
    assert text(HI, tools=[{"name": "add"}]) == '<s>{tools:[{"name": "add"}]}[user:hi]>'
    assert '{"a": {"type": "integer", "description": "the first"}' in text(HI, tools=[add])
    assert text(HI, tools=[], documents=[]) == "<s>[user:hi]>"
    assert text(HI, documents=[{"title": "t", "text": "x"}]) == '<s>{docs:[{"title": "t", "text": "x"}]}[user:hi]>'
    assert (
        text(HI, template_kwargs={"mood": "gay", "unknown": 1, "where": 2, "template": 3}) == "<s>{mood:gay}[user:hi]>"
    )
    continued = text(
        [*HI, {"role": "assistant", "content": "so "}], continue_final_message=True, add_generation_prompt=False
    )
    assert continued == "<s>[user:hi][assistant:so "
    assert text(HI, chat_template="{{ messages | length }}") == "1"
    (tmp_path / "t.jinja").write_text("{{ messages[0].role }}é")
    assert text(HI, chat_template=tmp_path / "t.jinja") == "useré"


def test_named_templates_are_chosen_by_name(tmp_path):
    templates = [{"name": "default", "template": "d{{ '' }}"}, {"name": "tool_use", "template": "t{{ '' }}"}]
    tokenizer = chat_tokenizer(tmp_path, templates)
    made = functools.partial(prompt_tokens, tokenizer, 64, HI)
    assert [
        tokenizer.decode(made(**options)) for options in ({}, {"tools": [{"name": "f"}]}, {"chat_template": "tool_use"})
    ] == list("dtt")
    tokenizer = chat_tokenizer(tmp_path, [templates[1]])
    with pytest.raises(ValueError, match="chat_template=None: expected one of 'tool_use'"):
        prompt_tokens(tokenizer, 64, HI)
    with pytest.raises(
        ValueError, match="chat_template='other': expected the text of a Jinja template, or one of 'tool_use'"
    ):
        prompt_tokens(tokenizer, 64, HI, chat_template="other")


def test_tokens_equal_those_of_transformers(tokenizer):
    messages = [{"role": "system", "content": " be\n"}, *HI, {"role": "assistant", "content": "</s>déjà"}, *HI]
    for template in (CHATML, TEMPLATE):
        expected = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )
        assert prompt_tokens(tokenizer, 4096, messages, chat_template=template) == expected


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty: expected at least one"),
        (None, "messages=None: expected a list of {'role'"),
        ("hi", "messages='hi': expected a list"),
        (HI[0], "messages={'role': 'user', 'content': 'hi'}: expected a list"),
        (["hi"], r"messages\[0\]='hi': expected a dictionary with 'role' and 'content'"),
        ([*HI, {"content": "x"}], r"messages\[1\].role=None: expected text: 'system'"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role=3: expected"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role='': expected"),
        ([{"role": "user"}], r"messages\[0\].content is missing: expected text"),
        ([{"role": "user", "tool_calls": [CALL]}], r"messages\[0\].content is missing"),
        ([{"role": "assistant"}], "content is missing: expected .* or tool_calls"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content=3: expected text, or a list"),
        ([{"role": "user", "content": [3]}], r"messages\[0\].content\[0\]=3: expected {'type': 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text=None: expected {'type': 'text'"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x" * 999}}],
                }
            ],
            r"messages\[0\].content\[1\].type='image_url': images, audio and files are not supported",
        ),
        ([{"role": "assistant", "tool_calls": "x"}], r"messages\[0\].tool_calls='x': expected a list of {'function'"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]={}: expected {'function'"),
        ([{"role": "assistant", "tool_calls": [{"name": 3}]}], r"tool_calls\[0\].name=3: expected the name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
            r"messages\[0\].tool_calls\[0\].function.arguments=\[1\]: expected an object, or a text, the JSON of one",
        ),
        (
            [{"role": "pirate", "content": "x"}],
            "messages: the chat template refuses them: No pirates here; change them, or",
        ),
        (
            [{"role": "user", "content": "x" * 99999}],
            r"of 100\d\d\d characters, which max_len=64 tokens cannot hold; shorten",
        ),
    ],
)
def test_bad_messages_are_refused(tokenizer, messages, words):
    with pytest.raises(ValueError, match=words) as caught:
        prompt_tokens(tokenizer, 64, messages)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chat_template": "{% for %}"}, "chat_template, line 1: .*; correct the template"),
        (
            {"chat_template": "{{ a.b.c }}"},
            r"template fails on them \(UndefinedError: 'a' is undefined\); change them, or give",
        ),
        ({"chat_template": "{{ 1 / 0 }}"}, r"template fails on them \(ZeroDivisionError"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, r"template fails on them \(SecurityError"),
        ({"chat_template": "{% for i in range(10 ** 9) %}x{% endfor %}"}, r"template fails on them \(OverflowError"),
        ({"chat_template": "{{ 'x' * 10 ** 6 }}"}, "of 1000000 characters, which max_len=64 tokens cannot hold"),
        ({"chat_template": "{{ raise_exception('a\n\x1b[2J' + 'b' * 999) }}"}, r"refuses them: a \?\[2Jbbb"),
        ({"chat_template": "{{ '' }}"}, "makes an empty prompt of them; expected another chat_template"),
        (
            {"chat_template": "{" + "x" * MAX_TEMPLATE},
            f"chat_template has {MAX_TEMPLATE + 1} characters: expected at most",
        ),
        ({"chat_template": "t.jinja"}, r"chat_template='t.jinja': expected the text .* give pathlib.Path\(...\)"),
        ({"chat_template": 3}, "chat_template=3: expected the text of a Jinja template"),
        (
            {"chat_template": FAMILY / "nowhere"},
            "nowhere' cannot be read .No such file or directory.: expected a Jinja file",
        ),
        ({"chat_template": FAMILY}, "cannot be read .Is a directory.: expected a Jinja file"),
        ({"chat_template": FAMILY / "target/model.safetensors"}, "expected a Jinja file, text in UTF-8"),
        ({"chat_template": FAMILY / "losses.csv"}, "losses.csv': expected a Jinja file"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0: expected None, an integer of at least 1, or -1"),
        ({"truncate_prompt_tokens": "9"}, "truncate_prompt_tokens='9': expected None, an integer"),
        ({"continue_final_message": True}, "continue_final_message=True goes on .* give add_generation_prompt=False"),
        ({"continue_final_message": "content"}, "continue_final_message='content': expected True or False"),
        ({"add_generation_prompt": 1}, "add_generation_prompt=1: expected True or False"),
        ({"tools": "x"}, "tools='x': expected a list of tools"),
        ({"tools": [{"name": "f"}, 3]}, r"tools\[1\]=3: expected {'type': 'function'"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type='web_search': expected 'function'"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, r"tools\[0\].type='custom': expected 'function'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name=None: expected the name of a function"),
        ({"tools": [{"type": "function", "function": 3}]}, r"tools\[0\].function=3: expected an object with 'name'"),
        ({"tools": [{"function": {"name": ""}}]}, r"tools\[0\].function.name='': expected the name"),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            r"tools\[0\].function.parameters=\[\]: expected a JSON schema",
        ),
        ({"tools": [lambda x: x]}, r"tools\[0\]=<function .* has no JSON schema"),
        ({"documents": {}}, "documents={}: expected a list of {'title'"),
        ({"documents": ["x"]}, r"documents\[0\]='x': expected {'title'"),
        ({"template_kwargs": {"tokenize": False}}, "tokenize=False: expected only variables of the chat template"),
        ({"template_kwargs": {"return_tensors": "pt"}}, "return_tensors='pt': expected only variables"),
        ({"template_kwargs": {"conversations": []}}, r"conversations=\[\]: expected only variables"),
    ],
)
def test_bad_templates_and_options_are_refused(tokenizer, options, words):
    with pytest.raises(ValueError, match=words) as caught:
        prompt_tokens(tokenizer, 64, HI, **options)
    assert len(str(caught.value)) < 500
    assert "\x1b" not in str(caught.value)
    prompt_tokens(tokenizer, 64, HI)


def test_missing_template_is_reported():
    """The family that comes with jspec completes code, and has none."""
    tokenizer = load_tokenizer(FAMILY / "target")
    with pytest.raises(
        ValueError, match=r"chat_template=None, and the checkpoint has no chat template of its own: .*; give"
    ):
        prompt_tokens(tokenizer, 64, HI)
    assert tokenizer is not None
    assert prompt_tokens(tokenizer, 64, HI, chat_template="# {{ messages[0].content }}") == tokenizer.encode("# hi")
    with pytest.raises(ValueError, match="messages need a tokenizer of transformers, and the checkpoint has none"):
        prompt_tokens(None, 64, HI)


def test_chat_takes_one_conversation_or_a_list(llm):
    prompt = llm.chat_prompt(HI, mood="calm", tools=[{"name": "add"}])
    assert llm.tokenizer.decode(prompt) == '<s>{tools:[{"name": "add"}]}{mood:calm}[user:hi]>'
    how = {"chat_template_kwargs": {"mood": "calm"}, "tools": [{"name": "add"}]}
    one = llm.chat(HI, max_tokens=20, seed=0, **how)
    assert (one.prompt_token_ids, one.text, one.finish_reason) == (prompt, ANSWER, "stop")
    params = [jspec.SamplingParams(max_tokens=n, temperature=0) for n in (2, 30)]
    several = llm.chat([HI, HI + HI], params)
    assert [len(result.token_ids) for result in several] == [2, len(ANSWER.encode()) + 1]
    assert several[1].prompt_token_ids == llm.chat_prompt(HI + HI)
    assert [result.text for result in llm.chat([HI], max_tokens=30)] == [ANSWER]
    streamed = list(jspec.stream(llm, llm.chat_prompt(HI), max_tokens=30))
    assert "".join(delta.text for delta in streamed) == ANSWER


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda llm: llm.chat([]), ValueError, "messages is empty"),
        (lambda llm: llm.chat([HI, []]), ValueError, r"messages\[1\] is empty"),
        (lambda llm: llm.chat([HI, [{"role": 3}]]), ValueError, r"messages\[1\]\[0\].role=3"),
        (lambda llm: llm.chat([HI, HI[0]]), ValueError, r"messages\[0\]=\[{.*: expected a dictionary with 'role'"),
        (
            lambda llm: llm.chat(HI, chat_template_kwargs=[1]),
            ValueError,
            r"chat_template_kwargs=\[1\]: expected a dictionary",
        ),
        (lambda llm: llm.chat(HI, max_tokns=3), TypeError, "no argument 'max_tokns'; did you mean 'max_tokens'"),
        (lambda llm: llm.chat(HI, jspec.SamplingParams(), max_tokens=3), TypeError, "give either params or its fields"),
        (
            lambda llm: llm.chat([HI, HI], [jspec.SamplingParams()]),
            ValueError,
            "params has 1 entries: expected one, or",
        ),
        (lambda llm: llm.chat([{"role": "user", "content": "x" * MAX_LEN}]), ValueError, "tokens, but max_len=128"),
        (lambda llm: jspec.generate(llm, HI), ValueError, r"prompt 0 is a chat message: call llm.chat\(messages\)"),
        (lambda llm: jspec.generate(llm, "x", messages=HI), TypeError, r"'messages': call llm.chat\(messages\)"),
    ],
)
def test_refused_calls_leave_the_model_usable(llm, call, error, words):
    with pytest.raises(error, match=words):
        call(llm)
    assert llm.chat(HI, max_tokens=30).text == ANSWER
