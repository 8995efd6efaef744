"""Agents that read a file, change it and run it, through ``jspec serve``: Codex, Claude Code, opencode, qwen-code and pi.

    npm install --prefix DIR @openai/codex @anthropic-ai/claude-code opencode-ai @qwen-code/qwen-code \\
        @earendil-works/pi-coding-agent
    python examples/agents/run.py --clients DIR                       # with a scripted target, on a CPU
    python examples/agents/run.py --clients DIR --address http://127.0.0.1:8000 --model NAME   # with your own server

No model that knows tools comes with jspec. So without ``--address`` a scripted target stands in for one
(``scripted_server.py``): what it writes is given, and all else is as in every server. Each agent gets a folder with a file
that prints 41, is asked to make it print 42 and to run it, and has to have done so.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from long_target import long_target
from scripted_server import answer, call

HERE = pathlib.Path(__file__).parent
TASK = "a.py prints 41. Read it, change it so that it prints 42, run it, and say what it prints."
BEFORE, AFTER, KEY = "print(41)\n", "print(42)", "a-key"
COMMANDS = ("cat a.py", "sed -i s/41/42/ a.py", f"{sys.executable} a.py")
SECONDS = 300  # for each agent
PASSED_ON = ("PATH", "LANG", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")  # of this environment


class Agent:
    """How an agent is asked to do something.

    Args:
      program: of its npm package.
      shell: makes the call of its tool that runs a command.
      arguments: of the program.
      variables: of its environment, for an address and a model.
      files: that it reads from its home folder, for an address and a model.
    """

    def __init__(
        self,
        program: str,
        shell: Callable[[str], str],
        arguments: Callable[[str, str], list[str]],
        variables: Callable[[str, str], dict[str, str]],
        files: Callable[[str, str], dict[str, Any]] = lambda address, model: {},
    ):
        self.program, self.shell, self.arguments, self.variables, self.files = (
            program,
            shell,
            arguments,
            variables,
            files,
        )


def _codex(address: str, model: str) -> list[str]:
    provider = f'{{name="jspec", base_url="{address}/v1", wire_api="responses", env_key="JSPEC_KEY"}}'
    settings = ["-c", "model_provider=jspec", "-c", f"model_providers.jspec={provider}", "-m", model]
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *settings, TASK]


def _pi(address: str, model: str) -> dict[str, Any]:
    models = [{"id": model, "contextWindow": 100_000, "maxTokens": 4_000}]
    provider = {"baseUrl": f"{address}/v1", "api": "openai-completions", "apiKey": KEY, "models": models}
    return {".pi/agent/models.json": {"providers": {"jspec": provider}}}


def _opencode(address: str, model: str) -> dict[str, Any]:
    options = {"baseURL": f"{address}/v1", "apiKey": KEY}
    limits = {"context": 100_000, "output": 4_000}
    models = {model: {"name": model, "tool_call": True, "limit": limits}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "jspec", "options": options, "models": models}
    settings = {"provider": {"jspec": provider}, "permission": {"bash": "allow", "edit": "allow"}, "autoupdate": False}
    return {".config/opencode/opencode.json": {**settings, "small_model": f"jspec/{model}"}}


AGENTS = {
    "codex": Agent(
        "codex",
        lambda command: call("exec_command", cmd=command),
        _codex,
        lambda address, model: {"JSPEC_KEY": KEY},
    ),
    "claude-code": Agent(
        "claude",
        lambda command: call("Bash", command=command, description="Run a command"),
        lambda address, model: ["-p", TASK, "--model", model, "--allowedTools", "Bash"],
        lambda address, model: {
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    "opencode": Agent(
        "opencode",
        lambda command: call("bash", command=command, description="Run a command"),
        lambda address, model: ["run", "-m", f"jspec/{model}", TASK],
        lambda address, model: {},
        _opencode,
    ),
    "qwen-code": Agent(
        "qwen",
        lambda command: call("run_shell_command", command=command, is_background=False),
        lambda address, model: ["-p", TASK, "--yolo", "--auth-type", "openai"],
        lambda address, model: {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{address}/v1", "OPENAI_MODEL": model},
    ),
    "pi": Agent(
        "pi",
        lambda command: call("bash", command=command),
        lambda address, model: ["-p", TASK, "--no-session", "--provider", "jspec", "--model", model],
        lambda address, model: {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        _pi,
    ),
}


@contextlib.contextmanager
def scripted(agent: Agent, folder: pathlib.Path) -> Iterator[str]:
    """The address of a server whose target does what the task asks, as this agent's model would."""
    texts = [*map(agent.shell, COMMANDS), answer("It prints 42.")]
    (script := folder / "script.json").write_text(json.dumps(texts))
    command = [sys.executable, str(HERE / "scripted_server.py"), str(script), str(long_target(folder / "target"))]
    command += ["--draft", "ngram", "--num-speculative-tokens", "4", "--served-model-name", "m", "--port", "0"]
    command += ["--max-model-len", "100000", "--max-num-seqs", "2", "--dtype", "float32", "--api-key", KEY]
    log = folder / "server.log"
    with log.open("w") as file, subprocess.Popen(command, stderr=file, stdout=file) as process:
        try:
            while not (found := re.search(r"at (http://127.0.0.1:\d+)\n", log.read_text())):
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield found[1]
        finally:
            process.terminate()


def run(agent: Agent, clients: pathlib.Path, address: str, model: str, folder: pathlib.Path) -> str:
    """Let an agent do the task; returns what it said.

    Raises:
      SystemExit: it did not do it.
    """
    home, work = folder / "home", folder / "work"
    for made in (home, work):
        made.mkdir()
    (work / "a.py").write_text(BEFORE)
    for name, content in agent.files(address, model).items():
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text(json.dumps(content))
    program = clients.absolute() / "node_modules" / ".bin" / agent.program
    known = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    variables = {**known, "HOME": str(home), "NO_COLOR": "1", **agent.variables(address, model)}
    ended = subprocess.run(
        [str(program), *agent.arguments(address, model)],
        **{"cwd": work, "env": variables, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True},
        timeout=SECONDS,
    )
    said = ended.stdout.strip()
    if ended.returncode or AFTER not in (work / "a.py").read_text() or "42" not in said:
        raise SystemExit(f"{agent.program} ended with {ended.returncode}\n{said[-2000:]}\n{ended.stderr[-2000:]}")
    return said.splitlines()[-1]


def served(address: str) -> dict[str, float]:
    """What the server has counted."""
    text = httpx.get(f"{address}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    names = {"prompt tokens": "vllm:prompt_tokens_total", "cached": "vllm:prefix_cache_hits_total"}
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(metric))
        for name, metric in names.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=pathlib.Path, required=True, help="folder of npm install --prefix")
    parser.add_argument("--address", help="of your own server; without it, one with a scripted target is started")
    parser.add_argument("--model", default="m", help="the model's name at that server; %(default)s")
    parser.add_argument("agents", nargs="*", metavar="agent", help=f"among {', '.join(AGENTS)}; all by default")
    args = parser.parse_args()
    for name in args.agents or AGENTS:
        agent = AGENTS[name]
        with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
            folder = pathlib.Path(made)
            address = args.address or stack.enter_context(scripted(agent, folder))
            started = time.monotonic()
            said = run(agent, args.clients, address, args.model, folder)
            seconds, counted = time.monotonic() - started, {} if args.address else served(address)
            numbers = ", ".join(f"{value:,.0f} {what}" for what, value in counted.items())
            print(f"{name}: {said!r} after {seconds:.1f} s{f'; {numbers}' if numbers else ''}", flush=True)


if __name__ == "__main__":
    main()
