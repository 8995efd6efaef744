"""What the worst inputs of a stranger cost, of the largest size that jspec takes, and what becomes of them.

    python -m benchmarks.host.worst_inputs          # about a minute; the table of docs/guides/security.md
    python -m benchmarks.host.worst_inputs --case template    # one case, in this process

Every case runs in a process of its own, which the parent ends after ``PATIENCE`` seconds. Memory is what that process's
largest resident size grew by; grammars are compiled in a child process of it, whose memory has a limit of its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report.markdown import table

PATIENCE = 60  # seconds
MIB = 2**20
Case = Callable[[Path], Callable[[], object]]  # prepares in a folder, and returns what is measured
CASES: dict[str, tuple[str, Case]] = {}


def case(name: str, what: str) -> Callable[[Case], Case]:
    def add(prepare: Case) -> Case:
        CASES[name] = what, prepare
        return prepare

    return add


@case("patterns", "20 patterns of modules of 100 characters in config.json, over 7,680 modules")
def _patterns(folder: Path):
    import re

    from jspec.checkpoints.quantized.config_fields import Modules

    slow = re.compile(r"[a-z_0-9.]*[a-z_0-9.]*[a-z_0-9.]*z")
    modules = Modules(frozenset(), (slow,) * 20, "ignore")
    names = [f"model.layers.{i}.block_sparse_moe.experts.{j}.down_proj" for i in range(60) for j in range(128)]
    return lambda: [modules.include([name]) for name in names]


@case("config", "config.json of 1 MiB, one list of numbers")
def _config(folder: Path):
    from jspec.checkpoints.checkpoint import Checkpoint

    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "x": [7] * (MIB // 3 - 30)}))
    return lambda: Checkpoint.open(folder).target_config


@case("template", "a chat template with loops in loops")
def _template(folder: Path):
    return _chat("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "A queue.")


@case("long template", "a chat template of 1 MiB, 80,000 expressions")
def _long_template(folder: Path):
    return _chat("{{ 1 + 1 }}  " * 80_000, "A queue.")


@case("long chat", "a chat of 8 MiB under an ordinary template")
def _long_chat(folder: Path):
    return _chat("{% for m in messages %}# {{ m.role }}: {{ m.content | trim }}\n{% endfor %}", "def " * (2 * MIB))


def _chat(template: str, content: str):
    from jspec.checkpoints.tokenizer import load_tokenizer
    from jspec.commands.demo import FAMILY
    from jspec.text.chat_template import prompt_tokens

    tokenizer = load_tokenizer(FAMILY / "target")
    messages = [{"role": "user", "content": content}]
    prompt_tokens(tokenizer, 2048, [{"role": "user", "content": "a"}], chat_template="{{ messages[0].content }}")
    return lambda: prompt_tokens(tokenizer, 2048, messages, chat_template=template)


@case("tokenizer", "tokenizer.json of 64 MiB, 2.1 million tokens")
def _tokenizer(folder: Path):
    from jspec.checkpoints.tokenizer import load_tokenizer
    from jspec.commands.demo import FAMILY

    load_tokenizer(FAMILY / "target")
    raw = json.loads((FAMILY / "target" / "tokenizer.json").read_text())
    raw["model"]["vocab"] |= {f"token-number-{i:07d}": i + len(raw["model"]["vocab"]) for i in range(2_100_000)}
    (folder / "tokenizer.json").write_text(json.dumps(raw, separators=(",", ":")))
    size = (folder / "tokenizer.json").stat().st_size
    if not 60 * MIB < size <= 64 * MIB:
        raise AssertionError(f"{size / MIB} MiB")
    return lambda: load_tokenizer(folder)


@case("backtracking", "a tokenizer whose pattern backtracks, and a prompt of 40 letters")
def _backtracking(folder: Path):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    from jspec.text.detokenizer import encode

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "!": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    return lambda: encode(tokenizer, "a" * 40 + "!", "the prompt")  # pyright: ignore[reportArgumentType]


@case("references", "a JSON schema with 900 $ref in a row")
def _references(folder: Path):
    return _grammar("properties in a row")


@case("endless grammar", "a JSON schema whose patterns' states multiply")
def _endless(folder: Path):
    return _grammar(None)


@case("million", "a regular expression that repeats a million times")
def _million(folder: Path):
    return _grammar("a million times")


def _grammar(name: str | None):
    from benchmarks.soak.hostile_grammars import ENDLESS, HOSTILE
    from jspec.checkpoints.tokenizer import load_tokenizer
    from jspec.commands.demo import FAMILY
    from jspec.sampling.structured import StructuredOutputsParams
    from jspec.text.grammar.grammars import Grammars

    grammars = Grammars(load_tokenizer(FAMILY / "target"), 2048, (1,))
    grammars.compile(StructuredOutputsParams(choice=("a",))).result()
    form = StructuredOutputsParams(**(ENDLESS[0] if name is None else HOSTILE[name][0]))
    return lambda: grammars.compile(form).result()


@case("body", "a body of 8 MiB, as many numbers as may be in it")
def _body(folder: Path):
    return _parsed('{"prompt":[' + ",".join(["7" * 14] * (2**19 - 1)) + "]}")


@case("body of lists", "a body of 8 MiB, four million numbers")
def _lists(folder: Path):
    return _parsed('{"prompt":[' + ",".join(["7"] * (4 * MIB - 30)) + "]}")


def _parsed(text: str):
    from jspec.serving.generation.json_body import parse_object
    from jspec.serving.http.limits import Limits

    body = text.encode()
    if len(body) > Limits().max_body_bytes:
        raise AssertionError(len(body))
    return lambda: parse_object(body, Limits())


def measured(name: str) -> dict:
    """Seconds, MiB and the outcome of a case, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        work = CASES[name][1](Path(folder))
        memory, began = _memory(), time.monotonic()
        try:
            work()
            outcome = "taken"
        except Exception as error:
            outcome = f"refused: {str(error).replace(folder, '')[:160]}"
        seconds = time.monotonic() - began
    return {"seconds": round(seconds, 2), "MiB": round((_memory() - memory) / 1024), "outcome": outcome}


def _memory() -> int:
    """KiB, the most that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def in_child(name: str) -> dict:
    """The same, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.host.worst_inputs", "--case", name]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except subprocess.TimeoutExpired:
        return {"seconds": round(time.monotonic() - began), "MiB": None, "outcome": "did not end"}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measured(args.case)))
        return
    rows = {name: in_child(name) for name in CASES}
    print(table(["input", "s", "MiB", "outcome"], [[CASES[n][0], *map(str, row.values())] for n, row in rows.items()]))


if __name__ == "__main__":
    main()
