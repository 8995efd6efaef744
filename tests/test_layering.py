"""Which package may import which, and what importing jspec costs."""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tiny import tiny_checkpoint

from convert import convert

ROOT = Path(__file__).parent.parent
JSPEC = ROOT / "jspec"

# What each part of jspec knows of the others, besides itself and the leaves below it.
LEAVES = {
    "__init__",
    "_child_process",
    "_validation",
    "compilation_cache",
    "config",
    "outputs",
    "quantization",
    "registry",
    "sampling.request_keys",
    "text.detokenizer",
    "text.prompts",
    "text.stop_strings",
    "text.token_spans",
}
KNOWS = {
    "pallas": set(),
    "sampling": {"pallas"},
    "models": {"pallas"},
    "drafting": {"models", "pallas", "sampling"},
    "text": {"sampling"},
    "engine": {"drafting", "models", "pallas", "sampling", "text.grammar"},
    "checkpoints": {"models"},
    "serving": {
        "engine",
        "drafting",
        "models",
        "sampling",
        "llm",
        "api",
        "commands.model_args",
        "loading",
        "text.chat_template",
        "text.grammar",
    },
    "bench": {"checkpoints", "commands.model_args", "text.chat_template"},
}
KNOW_CHECKPOINTS = {"api", "bench", "doctor", "loading", "train", "checkpoints"}
KNOW_TRAIN = {"train", "cli", "doctor"}  # the last tries heads by the attention that trains them
KNOW_SERVING = {"serving", "cli", "__init__"}  # the last only names what it imports lazily


def imports(file: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or "unpickle" in file.parts  # which is also a package by itself
            yield from (f"{node.module}.{name.name}" for name in node.names if node.level == 0)


def part(path: Path) -> str:
    """``engine`` of jspec/engine/runner/step.py, ``api`` of jspec/api.py."""
    return path.relative_to(JSPEC).parts[0].removesuffix(".py")


def allowed(module: str, others: set[str]) -> bool:
    """Whether ``text.grammar.limits`` is one of ``others``, or lies in one of them: ``text`` or ``text.grammar``."""
    return any(f"{module}.".startswith(f"{other}.") for other in others)


def edges() -> set[tuple[str, str, str]]:
    """(part, what it imports of jspec, file) and (part, other package, file) of all of jspec."""
    found = set()
    for file in sorted(JSPEC.rglob("*.py")):
        for module in imports(file):
            package, _, rest = module.partition(".")
            found.add((part(file), rest if package == "jspec" and rest else package, str(file.relative_to(ROOT))))
    return found


def test_imports_run_one_way():
    wrong = [
        edge
        for edge in sorted(edges())
        if edge[0] in KNOWS
        and edge[1].split(".")[0] in {part(path) for path in JSPEC.iterdir() if path.suffix in ("", ".py")}
        and not allowed(edge[1], LEAVES | KNOWS[edge[0]] | {edge[0]})
    ]
    assert wrong == []


def test_who_knows_checkpoints_training_and_serving():
    seen = {(edge[0], edge[1].split(".")[0], edge[2]) for edge in edges()}
    assert not [edge for edge in seen if edge[1] == "convert"]
    assert not [edge for edge in seen if edge[1] == "checkpoints" and edge[0] not in KNOW_CHECKPOINTS]
    assert not [edge for edge in seen if edge[1] == "train" and edge[0] not in KNOW_TRAIN]
    assert not [edge for edge in seen if edge[1] == "serving" and edge[0] not in KNOW_SERVING]
    assert {("api", "checkpoints"), ("cli", "train")} <= {edge[:2] for edge in seen}  # it does see imports


def run(code: str, *arguments, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=True).stdout


HEAVY = ("jax", "numpy", "orbax", "tensorstore", "transformers", "tokenizers", "safetensors", "flax", "rich", "convert")
HEAVY += ("starlette", "uvicorn", "pydantic", "prometheus_client", "aiohttp", "matplotlib", "llguidance")


def test_importing_jspec_loads_nothing():
    """Neither jax nor anything that reads checkpoints: a name is imported when it is first used."""
    loaded = run("import sys; before = set(sys.modules); import jspec; print(*(set(sys.modules) - before))").split()
    assert not {module.split(".")[0] for module in loaded} & set(HEAVY)
    assert {module for module in loaded if module.startswith("jspec")} == {"jspec"}


def test_measuring_a_server_needs_no_jax():
    loaded = run("import sys, jspec.cli, jspec.bench.serve; print(*sys.modules)").split()
    assert "jspec.bench.serve" in loaded
    assert not {"jax", "flax", "transformers"} & set(loaded)


def test_supervisor_needs_no_jax():
    loaded = run("import sys, jspec.cli, jspec.serving.supervisor.command; print(*sys.modules)").split()
    assert "jspec.serving.supervisor.proxy" in loaded
    assert not {"jax", "flax", "numpy", "transformers", "ray"} & set(loaded)


def test_the_command_starts_without_anything_heavy():
    loaded = run("import sys, jspec.cli; print(*sys.modules)").split()
    assert not {module.split(".")[0] for module in loaded} & set(HEAVY) - {"rich"}


LOAD = """
    import os, sys
    sys.path.insert(0, os.getcwd())  # as python -m and an interactive session have it
    import jspec
    llm = jspec.load(sys.argv[1], max_batch=1, max_len=32, page_size=16, prefill_chunk=16)
    print(llm.target.config.vocab_size, "convert" in sys.modules)
"""


def test_modules_of_the_user_are_left_alone(tmp_path):
    """A converted folder is loaded though a file in the working directory has the name of one of ours."""
    convert(tiny_checkpoint(tmp_path / "src"), tmp_path / "out")
    for module in ("convert", "source", "weights", "tokenizer", "manifest"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('imported')")
    assert run(LOAD, tmp_path / "out", cwd=tmp_path) == "97 False\n"
