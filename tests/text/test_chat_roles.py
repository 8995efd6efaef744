"""System and developer messages under templates that write them everywhere, at the beginning, or not at all."""

import itertools
import operator

import jinja2
import pytest

from jspec.text.chat_roles import AS_USERS, CALL, written_instructions

WRITE = "[{{ message.role }}:{{ message.content }}]"
LOOP = "{% for message in messages %}" + WRITE + "{% endfor %}"
TEMPLATES = {
    "all roles": LOOP,
    "no developer": "{% for message in messages %}{% if message.role != 'developer' %}"
    + WRITE
    + "{% endif %}{% endfor %}",
    "system first": (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first or message.role == 'developer' %}"
        "{{ raise_exception('no') }}{% endif %}" + WRITE + "{% endfor %}"
    ),
    "developer first": (
        "{% for message in messages %}{% if loop.first or message.role in ('user', 'assistant') %}"
        "{% if message.role != 'system' %}" + WRITE + "{% endif %}{% endif %}{% endfor %}"
    ),
    "none": "{% for message in messages %}{% if message.role in ('user', 'assistant') %}"
    + WRITE
    + "{% endif %}{% endfor %}",
    "refuses": (
        "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
        "{{ raise_exception('no') }}{% endif %}" + WRITE + "{% endfor %}"
    ),
}

# How templates of public models treat what an agent sends, in fewer words.
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}"
)
QWEN = (  # 3 writes them anywhere, 3.5 refuses later ones; both leave out reasoning before the user's last message
    "{% set last = namespace(user=-1) %}{% for m in messages if m.role == 'user' %}"
    "{% set last.user = messages.index(m) %}{% endfor %}{% for m in messages %}CHECK"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > last.user %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}" + CALLS + "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if generates %}<|im_start|>assistant\n{% endif %}"
)
FIRST_ALONE = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}{% endif %}"
MODELS = {
    "Qwen3": QWEN.replace("CHECK", ""),
    "Qwen3.5": QWEN.replace("CHECK", FIRST_ALONE),
    "MiniMax-M2": (  # ignores later ones
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}]~b]{{ m.role }}\n{{ m.content }}"
        + CALLS
        + "[e~[\n{% endif %}{% endfor %}{% if generates %}]~b]ai\n{% endif %}"
    ),
    "DeepSeek-V3.1": (  # gathers them at the head
        "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% else %}<｜Assistant｜></think>{{ m.content }}" + CALLS + "<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if generates %}<｜Assistant｜></think>{% endif %}"
    ),
    "Mistral-Small": (  # wants users and answers in turn, and knows no others
        "{% set turn = namespace(user=true) %}{% for m in messages %}"
        "{% if m.role == 'system' and loop.first %}[SYSTEM]{{ m.content }}"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% elif m.tool_calls %}" + CALLS + "</s>"
        "{% elif m.role not in ('user', 'assistant') or (m.role == 'user') != turn.user %}{{ raise_exception('no') }}"
        "{% else %}{% set turn.user = not turn.user %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}"
        "{% endif %}{% endfor %}"
    ),
}


class Refused(Exception):
    """What a template raises by itself."""


def renderer(name):
    def refuse(why):
        raise Refused(why)

    template = jinja2.Environment().from_string({**TEMPLATES, **MODELS}[name], globals={"raise_exception": refuse})
    return lambda messages, **variables: template.render(messages=messages, **variables)


def conversation(*roles):
    """Messages of these roles; ``calls`` is the model's."""
    messages = [{"role": role, "content": f"{role[0]}{i}"} for i, role in enumerate(roles)]
    return [m | {"role": "assistant", "tool_calls": [CALL]} if m["role"] == "calls" else m for m in messages]


def text(name, *roles):
    """The template's text, with ``<..>`` for an instruction in another's message."""
    renders = renderer(name)
    written = renders(written_instructions(conversation(*roles), "messages", renders))
    before, behind = AS_USERS.split("{}")
    return (
        written.replace(f"\n\n{before}", f" {before}")
        .replace(f"{behind}\n\n", f"{behind} ")
        .replace(before, "<")
        .replace(behind, ">")
    )


@pytest.mark.parametrize(
    ("name", "roles", "expected"),
    [
        ("all roles", "developer user", "[developer:d0][user:u1]"),
        ("all roles", "system user system user", "[system:s0][user:u1][system:s2][user:u3]"),
        ("no developer", "developer user", "[system:d0][user:u1]"),
        ("no developer", "developer developer user", "[system:d0][system:d1][user:u2]"),
        ("no developer", "user assistant developer user", "[user:u0][assistant:a1][system:d2][user:u3]"),
        ("system first", "system user", "[system:s0][user:u1]"),
        ("system first", "developer user", "[system:d0][user:u1]"),
        ("system first", "system system user", "[system:s0\n\ns1][user:u2]"),
        ("system first", "system developer user", "[system:s0\n\nd1][user:u2]"),
        ("system first", "user system assistant user", "[user:u0 <s1>][assistant:a2][user:u3]"),
        ("system first", "system user assistant user system", "[system:s0][user:u1][assistant:a2][user:u3 <s4>]"),
        ("system first", "system user assistant developer user", "[system:s0][user:u1][assistant:a2][user:<d3> u4]"),
        ("system first", "user assistant system system", "[user:u0][assistant:a1][user:<s2> <s3>]"),
        (
            "system first",
            "user assistant system assistant user",
            "[user:u0][assistant:a1][user:<s2>][assistant:a3][user:u4]",
        ),
        ("system first", "system assistant system user system", "[system:s0\n\ns2][assistant:a1][user:u3 <s4>]"),
        ("system first", "user calls system tool tool user", "[user:u0][assistant:c1][tool:t3][tool:t4 <s2>][user:u5]"),
        (
            "system first",
            "user calls tool system tool calls",
            "[user:u0][assistant:c1][tool:t2][tool:t4 <s3>][assistant:c5]",
        ),
        ("system first", "user calls tool system", "[user:u0][assistant:c1][tool:t2 <s3>]"),
        ("no developer", "user calls tool developer", "[user:u0][assistant:c1][tool:t2][system:d3]"),
        ("developer first", "developer developer user", "[developer:d0\n\nd1][user:u2]"),
        ("developer first", "user developer assistant user", "[user:u0 <d1>][assistant:a2][user:u3]"),
        ("none", "user assistant user", "[user:u0][assistant:a1][user:u2]"),
    ],
)
def test_every_instruction_is_written(name, roles, expected):
    assert text(name, *roles.split()) == expected


@pytest.mark.parametrize(
    ("roles", "message"),
    [("system user", r"messages\[0\].role='system'"), ("user developer", r"messages\[1\].role='dev")],
)
def test_a_template_that_would_leave_an_instruction_out_is_refused(roles, message):
    with pytest.raises(
        ValueError, match=message + ".*the chat template writes no such message; expected its content in"
    ):
        text("none", *roles.split())


def test_a_template_refuses_an_instruction_in_its_own_words():
    with pytest.raises(Refused, match="no"):
        text("refuses", "system", "user")


def test_messages_of_the_caller_are_not_changed():
    messages = conversation("system", "developer", "user")
    written_instructions(messages, "messages", renderer("system first"))
    assert messages == conversation("system", "developer", "user")


def test_content_like_that_of_another_message_does_not_count():
    """The small conversation decides, not whether the words occur."""
    renders, messages = (
        renderer("no developer"),
        [{"role": "developer", "content": "hi"}, {"role": "user", "content": "hi"}],
    )
    assert renders(written_instructions(messages, "messages", renders)) == "[system:hi][user:hi]"


def working(turn, kind):
    """The messages of an agent, each of whose requests ended with a reminder, before its turn, and the next answer."""
    messages = [{"role": "system", "content": "You are an agent. " * 30}, {"role": "user", "content": "Mend it. " * 20}]
    messages.append({"role": "system", "content": "Agents: a, b, c. " * 10})
    for step in range(turn + 1):
        messages.append({"role": "system", "content": f"{9000 - step} tokens left"})
        answer = {"role": "assistant", "content": "", "reasoning_content": f"Step {step} is to read."}
        if kind == "talks":
            follows = [answer | {"content": f"Step {step}."}, {"role": "user", "content": f"Go on {step}."}]
        else:
            follows = [answer | {"tool_calls": [CALL]}, {"role": "tool", "content": f"Result {step}."}]
            follows += [{"role": "tool", "content": "Another."}] * (step % 2)
        messages += follows
    return messages[: -len(follows)], follows[0]


@pytest.mark.parametrize("kind", ["works", "talks"])
@pytest.mark.parametrize("name", MODELS)
def test_each_prompt_of_a_conversation_with_reminders_begins_with_the_one_before(name, kind):
    renders, before = renderer(name), ""
    for turn in range(10):
        messages, answer = working(turn, kind)
        written = written_instructions(messages, "messages", renders)
        prompt = renders(written, generates=True)
        shared = sum(itertools.takewhile(bool, map(operator.eq, before, prompt)))
        assert shared >= 0.95 * len(before)
        assert all(f"{9000 - step} tokens left" in prompt[-200 if step == turn else 0 :] for step in range(turn + 1))
        assert name == "Qwen3" or [m["role"] for m in written].count("system") == 1
        before = renders([*written, answer])


def test_a_long_conversation_takes_a_small_one_to_see():
    """What is rendered to find out does not grow with the conversation."""
    renders, sizes = renderer("Qwen3.5"), []

    def counted(messages):
        sizes.append(len(messages))
        return renders(messages)

    for turns in (3, 300):
        written_instructions(working(turns, "works")[0], "messages", counted)
    assert max(sizes) < 20
