"""``jspec serve`` of a real model, asked by OpenAI's client: tools, and answers in a JSON schema."""

import functools
import json
import signal
import sys
from collections.abc import Iterator

import pytest
from real_models import QWEN, folder, reference_model, reference_tokenizer, written
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
PARIS = {"city": "Paris", "unit": "celsius"}
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
    command += ["--max-num-seqs", "2", "--max-model-len", "512", "--dtype", "float32", "--reproducible"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "auto", "--log-level", "warning"]
    with running(command, place) as (process, address):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0, timeout=600) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Traceback" not in (place / "log").read_text()


def ask(client, messages=ASKED, **fields):
    fields = {"max_tokens": 64} | fields
    return client.chat.completions.create(model="m", messages=messages, temperature=0, **fields).choices[0]


@functools.cache
def by_transformers(chat: str) -> str:
    """transformers' greedy answer to a chat in JSON, with the tools in its prompt. The server's has the same repetition
    penalty, that of the model's generation_config.json."""
    tokenizer = reference_tokenizer(QWEN)
    prompt = tokenizer.apply_chat_template(json.loads(chat), tools=TOOLS, add_generation_prompt=True)["input_ids"]
    [text] = written(reference_model(QWEN), [prompt], 64, repetition_penalty=1.1)
    return tokenizer.decode(text, skip_special_tokens=True)


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_forced_calls(client, choice):
    answer = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert answer.finish_reason == ("stop" if choice is NAMED else "tool_calls")
    [call] = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", PARIS)


def test_calls_by_itself(client):
    """This model is too small for ``auto``: it writes its calls as code in Markdown, which stays text."""
    answer = ask(client, tools=TOOLS, tool_choice="auto")
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert answer.message.content == by_transformers(json.dumps(ASKED))
    assert '"name": "get_weather"' in answer.message.content


def test_results_of_calls(client):
    """The model reads its own calls and their results as its template writes them."""
    result = {"role": "tool", "tool_call_id": "1", "content": '{"temperature": 17, "unit": "celsius"}'}

    def chat(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        return [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, result]

    answer = ask(client, chat(json.dumps(PARIS)), tools=TOOLS)
    assert answer.message.content == by_transformers(json.dumps(chat(PARIS)))


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
    stream = client.chat.completions.create(model="m", messages=asked, temperature=0, max_tokens=64, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
