"""Real clients of agents against a server process: each calls a tool and uses its result.

The shipped models know no tools: with ``auto`` a scripted target stands in for a model that calls by itself, and with
``required`` a grammar forces the shipped target to call (``examples/agents/scripted_server.py``).
"""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import running
from tiers import in_tiers

from examples.agents.scripted_server import answer, call
from jspec.commands.demo import FAMILY

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

SCRIPTED = Path(__file__).parents[2] / "examples" / "agents" / "scripted_server.py"
THOUGHT, PATH, RESULT, ANSWER = "I look.", "a.py", "x = 41", "The number is 41."
ASKED = "What number is in a.py?"
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "enum": [PATH]}}, "required": ["path"]}
FUNCTION = {"name": "read_file", "description": "Reads a file.", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
WAYS = in_tiers([(s, c) for c in ("auto", "required") for s in (True, False)], test=((True, "auto"),))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("scripted")
    (script := folder / "script.json").write_text(json.dumps([call("read_file", THOUGHT, path=PATH), answer(ANSWER)]))
    command = [sys.executable, str(SCRIPTED), str(script), str(FAMILY / "target")]
    command += ["--served-model-name", "m", "--port", "0", "--dtype", "float32"]
    command += ["--max-num-seqs", "2", "--max-model-len", "1024", "--reproducible"]
    command += ["--api-key", "k", "--log-level", "warning"]
    with running(command, folder) as (process, address):
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "Traceback" not in (folder / "log").read_text()


def answered(stream: bool, of, asked: dict, last: str):
    """The answer of a client's resource, whole, or as its stream puts it together under the name ``last``."""
    if not stream:
        return of.create(**asked)
    with of.stream(**asked) as events:
        for _ in events:
            pass
        return getattr(events, last)()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_openai_chat(server, way):
    stream, choice = way
    messages: list = [{"role": "user", "content": ASKED}]
    with openai.OpenAI(base_url=f"{server}/v1", api_key="k", max_retries=0) as client:

        def ask(choice):
            asked = dict(model="m", messages=messages, tools=[CHAT_TOOL], tool_choice=choice, max_tokens=100)
            asked |= {"parallel_tool_calls": False}
            return answered(stream, client.chat.completions, asked, "get_final_completion").choices[0]

        first = ask(choice)
        assert first.finish_reason == "tool_calls"
        [call] = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("read_file", {"path": PATH})
        if choice == "auto":
            assert first.message.model_extra["reasoning"].strip() == THOUGHT
        function = {"name": call.function.name, "arguments": call.function.arguments}
        calls = [{"id": call.id, "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": first.message.content, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        assert ask("auto").message.content == ANSWER


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_openai_responses(server, way):
    stream, choice = way
    items: list = [{"role": "user", "content": ASKED}]
    with openai.OpenAI(base_url=f"{server}/v1", api_key="k", max_retries=0) as client:

        def ask(choice):
            asked = dict(model="m", input=items, tools=[{"type": "function", "strict": False, **FUNCTION}])
            asked |= dict(tool_choice=choice, max_output_tokens=100, store=False, parallel_tool_calls=False)
            return answered(stream, client.responses, asked, "get_final_response")

        first = ask(choice)
        [call] = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments), first.status) == ("read_file", {"path": PATH}, "completed")
        if choice == "auto":
            assert [item.type for item in first.output] == ["reasoning", "function_call"]
            assert first.usage.output_tokens_details.reasoning_tokens > 0
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
        assert ask("auto").output_text == ANSWER


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_anthropic_messages(server, way):
    stream, choice = way
    messages: list = [{"role": "user", "content": ASKED}]
    tool = {"name": "read_file", "input_schema": PARAMETERS}
    with anthropic.Anthropic(base_url=server, api_key="k", max_retries=0) as client:

        def ask(choice):
            asked = dict(model="m", messages=messages, tools=[tool], max_tokens=100)
            asked |= {
                "tool_choice": {"type": "any" if choice == "required" else choice, "disable_parallel_tool_use": True}
            }
            return answered(stream, client.messages, asked, "get_final_message")

        first = ask(choice)
        assert first.stop_reason == "tool_use"
        call = first.content[-1]
        assert (call.type, call.name, call.input) == ("tool_use", "read_file", {"path": PATH})
        if choice == "auto":
            assert (first.content[0].type, first.content[0].thinking.strip()) == ("thinking", THOUGHT)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        )
        messages.append({"role": "user", "content": [result]})
        assert [block.text for block in ask("auto").content if block.type == "text"] == [ANSWER]
        counted = client.messages.count_tokens(model="m", messages=messages, tools=[tool])
        assert counted.input_tokens > 20


@pytest.mark.parametrize("endpoint", in_tiers(("responses", "chat"), test=("responses",)))
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_openai_agents(server, way, endpoint):
    stream, choice = way
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    seen = []

    @agents.function_tool
    def read_file(path: str) -> str:
        """Reads a file."""
        seen.append(path)
        return RESULT

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="k", max_retries=0) as client:
            kind = agents.OpenAIResponsesModel if endpoint == "responses" else agents.OpenAIChatCompletionsModel
            settings = agents.ModelSettings(tool_choice=choice, max_tokens=100, parallel_tool_calls=False)
            agent = agents.Agent(
                name="a", model=kind(model="m", openai_client=client), tools=[read_file], model_settings=settings
            )
            if not stream:
                return (await agents.Runner.run(agent, ASKED)).final_output
            result = agents.Runner.run_streamed(agent, ASKED)
            async for _ in result.stream_events():
                pass
            return result.final_output

    assert asyncio.run(run()) == ANSWER
    assert len(seen) == 1
    assert choice == "required" or seen == [PATH]


@pytest.mark.parametrize("endpoint", in_tiers(("chat", "responses", "anthropic"), test=("chat",)))
@pytest.mark.parametrize("stream", in_tiers((True, False), test=(True,)))
def test_pydantic_ai(server, stream, endpoint):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run():
        if endpoint == "anthropic":
            client = anthropic.AsyncAnthropic(base_url=server, api_key="k", max_retries=0)
            model = AnthropicModel("m", provider=AnthropicProvider(anthropic_client=client))
        else:
            client = openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="k", max_retries=0)
            kind = OpenAIChatModel if endpoint == "chat" else OpenAIResponsesModel
            model = kind("m", provider=OpenAIProvider(openai_client=client))
        agent = pydantic_ai.Agent(model, model_settings={"max_tokens": 100})
        seen = []

        @agent.tool_plain
        def read_file(path: str) -> str:
            """Reads a file."""
            seen.append(path)
            return RESULT

        async with client:
            if stream:
                async with agent.run_stream(ASKED) as result:
                    text = await result.get_output()
            else:
                text = (await agent.run(ASKED)).output
        return text, seen

    assert asyncio.run(run()) == (ANSWER, [PATH])


@pytest.mark.parametrize("endpoint", in_tiers(("chat", "responses", "anthropic"), test=("chat",)))
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_langchain(server, way, endpoint):
    stream, choice = way
    chats = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage

    if endpoint == "anthropic":
        claude = pytest.importorskip("langchain_anthropic")
        model = claude.ChatAnthropic(model="m", base_url=server, api_key="k", max_tokens=100, max_retries=0)
    else:
        options = {"use_responses_api": True} if endpoint == "responses" else {}
        model = chats.ChatOpenAI(
            model="m", base_url=f"{server}/v1", api_key="k", max_tokens=100, max_retries=0, **options
        )
    messages: list = [HumanMessage(ASKED)]

    def ask(choice):
        bound = model.bind_tools(
            [CHAT_TOOL], tool_choice="any" if choice == "required" else choice, parallel_tool_calls=False
        )
        if not stream:
            return bound.invoke(messages)
        whole = None
        for chunk in bound.stream(messages):
            whole = chunk if whole is None else whole + chunk
        return whole

    first = ask(choice)
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("read_file", {"path": PATH})
    messages += [first, ToolMessage(RESULT, tool_call_id=call["id"])]
    content = ask("auto").content
    assert (content if isinstance(content, str) else "".join(part.get("text", "") for part in content)) == ANSWER
