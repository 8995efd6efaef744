"""System and developer messages under templates that write them everywhere, at the beginning, or not at all."""

import jinja2
import pytest

from jspec.text.chat_roles import written_instructions

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


class Refused(Exception):
    """What a template raises by itself."""


def renderer(name):
    def refuse(why):
        raise Refused(why)

    template = jinja2.Environment().from_string(TEMPLATES[name], globals={"raise_exception": refuse})
    return lambda messages: template.render(messages=messages)


def conversation(*roles):
    return [{"role": role, "content": f"{role[0]}{i}"} for i, role in enumerate(roles)]


def text(name, *roles):
    renders = renderer(name)
    return renders(written_instructions(conversation(*roles), "messages", renders))


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
        ("system first", "user system assistant user", "[system:s1][user:u0][assistant:a2][user:u3]"),
        ("system first", "system user assistant user system", "[system:s0\n\ns4][user:u1][assistant:a2][user:u3]"),
        ("developer first", "developer developer user", "[developer:d0\n\nd1][user:u2]"),
        ("developer first", "user developer assistant user", "[developer:d1][user:u0][assistant:a2][user:u3]"),
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
