"""``jspec serve`` of a real model, asked by OpenAI's client: tools, and answers in a JSON schema."""

import json
import signal
import sys
from collections.abc import Iterator

import pytest
from real_models import QWEN, folder
from server_process import running

openai = pytest.importorskip("openai")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city now.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
STOCK = {
    "name": "get_stock_price",
    "description": "The price of a company's stock.",
    "parameters": {"type": "object", "properties": {"symbol": {"type": "string"}}, "required": ["symbol"]},
}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, STOCK)]
ASKED = [{"role": "user", "content": "What is the weather in Paris, in celsius? Use a tool."}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator["openai.OpenAI"]:
    place = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "jspec.cli", "serve", str(folder(QWEN)), "--served-model-name", "m", "--port", "0"]
    command += ["--max-num-seqs", "2", "--max-model-len", "1024", "--dtype", "float32", "--reproducible"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "auto", "--log-level", "warning"]
    with running(command, place) as (process, address):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0, timeout=600) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Traceback" not in (place / "log").read_text()


def ask(client, messages=ASKED, **fields):
    return client.chat.completions.create(
        model="m", messages=messages, temperature=0, max_tokens=128, **fields
    ).choices[0]


def checked(choice) -> dict:
    """The arguments of the weather's tool in the one call of an answer."""
    print("CALLS", choice.message)
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER["parameters"])
    return arguments


@pytest.mark.parametrize("choice", [NAMED, "required", "auto"], ids=["named", "required", "auto"])
def test_tools(client, choice):
    answer = ask(client, tools=TOOLS, tool_choice=choice)
    assert answer.finish_reason == ("stop" if choice is NAMED else "tool_calls")
    assert checked(answer) == {"city": "Paris", "unit": "celsius"}


def test_a_result_is_answered(client):
    first = ask(client, tools=TOOLS, tool_choice="required")
    [call] = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 17, "unit": "celsius"}'}
    answer = ask(client, [*ASKED, first.message.model_dump(exclude_none=True), result], tools=TOOLS)
    print("ANSWER", answer.message)
    assert answer.finish_reason == "stop"
    assert "17" in answer.message.content


def test_json_schema(client):
    asked = [{"role": "user", "content": "Ada is 36 years old and speaks English and French. Give that as JSON."}]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = ask(client, asked, response_format=form)
    assert answer.finish_reason == "stop"
    found = json.loads(answer.message.content)
    jsonschema.validate(found, PERSON)
    assert (found["name"], found["age"]) == ("Ada", 36)


def test_streams_have_the_text_of_whole_answers(client):
    asked = [{"role": "user", "content": "用 Python 写一个斐波那契函数。🚀"}]
    whole = ask(client, asked).message.content
    stream = client.chat.completions.create(model="m", messages=asked, temperature=0, max_tokens=128, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
