"""verifiers, with which prime-rl trains, rolls out against a server process. It needs ``openai`` below 3, so this runs where
it is installed, in an environment of its own: ``pip install verifiers==0.4.0`` beside jspec."""

import asyncio
import shutil
import sys
from collections.abc import Iterator

import pytest
from openai_server import CHAT, family
from server_process import DRAFTS, serving

import jspec
from jspec.commands.demo import FAMILY

vf = pytest.importorskip("verifiers.v1")
openai = pytest.importorskip("openai")
renderers = pytest.importorskip("renderers.default")
base = pytest.importorskip("renderers.base")
configs = pytest.importorskip("renderers.configs")

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLING = {"temperature": 0.9, "top_k": 50, "max_tokens": 12, "seed": 7}
ASKED = "def main("


class Renderer(renderers.DefaultRenderer):
    """Continues a conversation by tokens, as verifiers' renderers of well-known models do."""

    config_class = configs.DefaultRendererConfig

    def bridge_to_next_turn(self, prompt, completion, messages, *, tools=None):
        before, new = [*prompt, *completion], self._apply(messages, tools=tools, add_generation_prompt=True)
        places = [-1] * len(before) + [0] * len(new)
        roles = [message["role"] for message in messages]
        return base.RenderedTokens(token_ids=before + new, message_indices=places, message_roles=roles)


class Harness(vf.Harness[vf.HarnessConfig]):
    """An agent that says the same twice."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = []
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                messages.append({"role": "user", "content": data.prompt})
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("serving"), *DRAFTS, "--api-key", "k") as (_, address):
        yield address


@pytest.fixture
def rolled_out(server, tmp_path, monkeypatch):
    """A function that gives the trace of a rollout with further settings."""
    folder = shutil.copytree(FAMILY / "target", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(CHAT)
    monkeypatch.setenv("KEY", "k")
    monkeypatch.setitem(sys.modules, "own_renderer", sys.modules[__name__])
    renderer = configs.CustomRendererConfig(import_path="own_renderer.Renderer")
    names = {"base_url": f"{server}/v1", "api_key_var": "KEY", "renderer_model_name": str(folder)}
    client, harness = vf.TrainClientConfig(**names, renderer=renderer), vf.HarnessConfig(id="null")

    def roll_out(**settings):
        seat = {"model": "family", "client": client, "harness": harness, "runtime": vf.SubprocessConfig()}
        agent = vf.make_agent(vf.AgentConfig(**seat, sampling=vf.SamplingConfig(**SAMPLING, **settings)))
        agent.harness = Harness(harness)
        return asyncio.run(agent.run(vf.Task(vf.TaskData(prompt=ASKED))))

    return roll_out


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_rollout_has_the_tokens_and_log_probabilities_of_generate(rolled_out, mode):
    trace = rolled_out(logprobs_mode=mode)
    assert trace.ok, trace.errors
    params = jspec.SamplingParams(**SAMPLING, logprobs=1, logprobs_mode=mode)
    expected, logprobs, sampled, reasons = list[int](), list[float](), list[bool](), list[str]()
    turn = family().tokenizer.encode(f"# user: {ASKED}\ndef ")
    for _ in range(2):
        prompt = expected + turn
        result = jspec.generate(family(), prompt, params)
        assert isinstance(result, jspec.Result)
        assert result.token_logprobs is not None
        expected = prompt + result.token_ids
        logprobs += [0.0] * len(turn) + result.token_logprobs.tolist()
        sampled += [False] * len(turn) + [True] * len(result.token_ids)
        reasons.append(result.finish_reason)
    [branch] = trace.branches
    assert branch.token_ids == expected
    assert branch.sampled_mask == sampled
    assert branch.logprobs == pytest.approx(logprobs, abs=3e-5)  # the server compiles with fewer optimizations
    assert [call.finish_reason for call in trace.calls] == reasons == ["length", "length"]


def test_a_stop_token_ends_a_turn(rolled_out):
    """The renderer sends the tokenizer's end of sequence, and jspec says ``stop`` with it among the tokens."""
    end = family().tokenizer.eos_token_id
    trace = rolled_out(logit_bias={str(end): 100})
    assert trace.ok, trace.errors
    assert [call.finish_reason for call in trace.calls] == ["stop", "stop"]
    assert [node.token_ids[-1] for node in trace.nodes if node.sampled] == [end, end]


def test_a_setting_that_jspec_has_not_is_an_error_of_the_rollout(rolled_out):
    trace = rolled_out(trace_decode_token_ids=[1])
    assert not trace.ok
    [error] = trace.errors
    assert error.status_code == 400
    assert "unknown field 'trace_decode_token_ids'" in error.message
