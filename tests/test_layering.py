"""Which package may import which, and what importing jspec costs."""

import ast
import functools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tiny import tiny_checkpoint

from convert import convert

ROOT = Path(__file__).parent.parent
JSPEC = ROOT / "jspec"

# Every part of jspec (a file or a folder directly in it), and which other parts it may import: every import in it counts,
# also those within functions. ``convert`` and the programs of the repository may import all of them.
FOUNDATION = {
    "_validation",
    "_foreign_names",
    "_child_process",
    "_interrupts",
    "quantization",
    "config",
    "registry",
    "outputs",
}
KNOWS = {
    "__init__": set(),  # it names the others in strings
    "_foreign_names": set(),
    "_validation": {"_foreign_names"},
    "_child_process": set(),
    "_interrupts": set(),
    "quantization": set(),
    "config": {"_validation", "quantization"},
    "registry": set(),
    "outputs": set(),
    "compilation_cache": {"_validation"},
    "pallas": FOUNDATION,
    "sampling": FOUNDATION | {"pallas"},
    "text": FOUNDATION | {"sampling"},
    "models": FOUNDATION | {"pallas"},
    "drafting": FOUNDATION | {"models", "pallas", "sampling", "text.detokenizer"},
    "engine": FOUNDATION
    | {"compilation_cache", "drafting", "models", "pallas.collectives", "pallas.delta_net", "sampling", "text"},
    "checkpoints": FOUNDATION | {"text.detokenizer"},
    "hub": FOUNDATION | {"checkpoints"},
    "loading": FOUNDATION | {"checkpoints", "drafting", "engine", "hub", "models", "sampling", "text"},
    "updates": FOUNDATION | {"checkpoints", "engine", "models"},
    "llm": FOUNDATION | {"engine", "models", "sampling", "text", "updates"},
    "api": FOUNDATION
    | {"checkpoints", "compilation_cache", "drafting", "engine", "llm", "loading", "sampling", "text", "updates"},
    "integrations": FOUNDATION | {"llm", "sampling"},
    "commands": FOUNDATION | {"hub", "llm", "loading", "text"},
    "serving": FOUNDATION
    | {"commands.group_args", "commands.model_args", "commands.warming", "commands.xla_alarms"}
    | {"engine", "llm", "sampling", "text"},
    "bench": FOUNDATION | {"checkpoints", "commands.group_args", "commands.model_args", "sampling", "text"},
    "train": FOUNDATION
    | {"checkpoints", "commands", "drafting", "engine", "hub", "llm", "loading", "models", "pallas", "sampling"}
    | {"text"},
    "doctor": FOUNDATION
    | {"checkpoints", "drafting", "hub", "llm", "loading", "models", "sampling", "text", "train.block_attention"}
    | {"train.ttt_attention"},
    "cli": FOUNDATION | {"bench", "commands", "serving", "train"},
}

# Inside of the largest parts: every folder, and the other folders of the part that it imports, also under TYPE_CHECKING.
# "." is what lies beside the folders.
INSIDE = {
    "checkpoints": {
        ".": {"converted", "files", "gguf", "huggingface", "layouts", "quantized", "tensors"},
        "gguf": {"converted", "files", "huggingface", "layouts", "quantized", "tensors"},
        "converted": {"files", "huggingface", "layouts", "quantized", "tensors"},
        "layouts": {"files", "huggingface", "quantized", "tensors"},
        "huggingface": {"files", "quantized", "tensors"},
        "quantized": {"files", "tensors"},
        "tensors": {"files"},
        "files": set(),
    },
    "pallas": {
        "mla": {".", "attention", "norm", "weights"},
        "delta_net": {"."},
        "collectives": {".", "matmul", "norm"},
        "norm": {".", "matmul"},
        "matmul": {".", "attention", "weights"},
        "moe": {".", "matmul", "weights"},
        "attention": {"."},
        "sampling": {"."},
        "weights": {"."},
        ".": set(),
    },
    "serving": {
        "worker": {"generation", "http", "server", "supervisor"},
        "server": {"anthropic", "generation", "http", "openai", "responses_api", "supervisor"},
        "supervisor": {"http"},
        "anthropic": {"generation", "http"},
        "openai": {"generation", "http"},
        "responses_api": {"generation", "http"},
        "generation": {".", "http"},
        "http": set(),
        ".": set(),
    },
    "engine": {
        ".": {"adaptive", "multihost", "runner", "scheduler"},
        "runner": {".", "adaptive", "aot_cache", "multihost", "scheduler"},
        "aot_cache": {".", "adaptive"},
        "scheduler": {"."},
        "adaptive": set(),
        "multihost": set(),
    },
}
# Folders, two levels deep, that import each other. A pair that no longer does leaves this list, and none may join it.
MUTUAL = {
    ("engine", "engine.runner"),
    ("engine", "engine.scheduler"),
    ("models", "models.heads"),
    ("text", "text.parsers"),
}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of jspec and its file: ``engine.loop`` of jspec/engine/loop.py, ``engine`` of its ``__init__.py``."""
    files = {".".join(file.relative_to(JSPEC).with_suffix("").parts): file for file in sorted(JSPEC.rglob("*.py"))}
    return {name.removesuffix(".__init__"): file for name, file in files.items()}


def imported(file: Path, for_types: bool = False) -> Iterator[str]:
    """What a file imports, anywhere in it: modules, and names of modules behind a point. What stands under ``TYPE_CHECKING``
    counts only if ``for_types``."""
    tree = ast.parse(file.read_text())
    guarded = (
        []
        if for_types
        else [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    )
    skipped = {inner for node in guarded for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or "unpickle" in file.parts  # which is also a package by itself
            yield from (f"{node.module}.{name.name}" for name in node.names if node.level == 0)


@functools.cache
def imports_of_jspec(for_types: bool = False) -> dict[str, set[str]]:
    """Every module of jspec, and those that it imports; what it imports by ``import jspec`` is of no module."""
    known = modules()
    graph = {}
    for module, file in known.items():
        inside = [name.removeprefix("jspec.") for name in imported(file, for_types) if name.startswith("jspec.")]
        graph[module] = {name if name in known else name.rpartition(".")[0] for name in inside} - {module, ""}
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of nodes of which each can be reached from each other one."""
    reached = {node: _reached(graph, node) for node in graph}
    return [
        set(circle)
        for circle in {frozenset(n for n in reached[node] if node in reached[n]) for node in graph}
        if circle
    ]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What can be reached from a node, by one edge at least."""
    seen, waiting = set(), [start]
    while waiting:
        for node in graph.get(waiting.pop(), set()) - seen:
            seen.add(node)
            waiting.append(node)
    return seen


def part(module: str) -> str:
    return module.partition(".")[0]


def allowed(module: str, others: set[str]) -> bool:
    """Whether ``text.grammar.limits`` is one of ``others``, or lies in one of them: ``text`` or ``text.grammar``."""
    return any(f"{module}.".startswith(f"{other}.") for other in others)


def test_every_part_has_its_rule():
    assert {part(module) for module in modules()} == set(KNOWS)


def test_imports_run_one_way():
    wrong = [
        f"{module} imports {other}"
        for module, others in imports_of_jspec().items()
        for other in sorted(others)
        if part(other) != part(module) and not allowed(other, KNOWS[part(module)])
    ]
    assert wrong == []


def test_rules_allow_nothing_that_is_not_imported():
    """So that they say what is, and an import that goes takes its rule along."""
    seen = {part(module): set() for module in modules()}
    for module, others in imports_of_jspec().items():
        seen[part(module)] |= others
    unused = {
        (name, other)
        for name, others in KNOWS.items()
        for other in others - FOUNDATION
        if not any(allowed(module, {other}) for module in seen[name])
    }
    assert unused == set()


def test_no_module_imports_itself_by_way_of_others():
    assert circles({module: others for module, others in imports_of_jspec(True).items() if module != "__init__"}) == []


def folder_of(module: str) -> str:
    """The folder of a module, at most two levels deep: ``checkpoints.files`` of checkpoints/files/unpickle/command.py."""
    return ".".join(modules()[module].relative_to(JSPEC).parent.parts[:2])


def test_folders_inside_of_parts_import_what_their_rules_say():
    seen = {part_of: {name: set() for name in rules} for part_of, rules in INSIDE.items()}
    for module, others in imports_of_jspec(for_types=True).items():
        if part(module) in INSIDE:
            mine, theirs = folder_of(module), {folder_of(other) for other in others if part(other) == part(module)}
            names = {folder.partition(".")[2] or "." for folder in theirs - {mine}}
            seen[part(module)][mine.partition(".")[2] or "."] |= names
    assert seen == INSIDE


def test_folders_that_import_each_other_are_those_that_did():
    arrows = {
        (folder_of(module), folder_of(other))
        for module, others in imports_of_jspec(for_types=True).items()
        for other in others
    }
    mutual = {(a, b) for a, b in arrows if "" not in (a, b) and a < b and (b, a) in arrows}
    assert mutual == MUTUAL


def test_no_part_imports_itself_by_way_of_others():
    graph = {part(module): set() for module in modules()}
    for module, others in imports_of_jspec().items():
        graph[part(module)] |= {part(other) for other in others} - {part(module)}
    assert circles(graph) == []


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [{"b", "c"}]
    assert "pallas.dispatch" in imports_of_jspec()["pallas.attention.table"]


def test_nothing_of_jspec_imports_other_packages_of_the_repository():
    others = {"convert", "benchmarks", "recipes", "tests", "examples"}
    assert [
        (module, name) for module, file in modules().items() for name in imported(file) if part(name) in others
    ] == []


def test_no_test_module_imports_another():
    files = list((ROOT / "tests").rglob("*.py"))
    modules_of_tests = {file.stem for file in files if file.stem.startswith("test_")}
    borrowers = {file.stem for file in files if {part(name) for name in imported(file)} & modules_of_tests}
    assert borrowers == set()


def test_maps_name_every_file():
    """ARCHITECTURE.md or the docstring of a package names every file in it."""
    architecture = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    missing = []
    for file in sorted(JSPEC.rglob("*.py")):
        if file.name == "__init__.py":
            continue
        package = file.with_name("__init__.py")
        described = ast.get_docstring(ast.parse(package.read_text())) or ""
        if file.parent == JSPEC:
            described = architecture
        if not re.search(rf"(?<![\w/]){file.stem}(\.py)?\b", described):
            missing.append(str(file.relative_to(ROOT)))
    assert missing == []


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


CONVERTING = """
    import sys, convert.cli
    print(*sys.modules)

    class Interrupt:
        def find_spec(self, name, *others):
            if name == "jax":
                raise KeyboardInterrupt

    sys.meta_path.insert(0, Interrupt())
    print(convert.cli.main(["source", "out"]))
"""


def test_converting_can_be_interrupted_before_jax_is_loaded():
    """That takes seconds, in which Ctrl-C would print a traceback."""
    loaded, exit_code = run(CONVERTING).splitlines()
    assert not {"jax", "flax", "orbax", "tensorstore", "transformers"} & set(loaded.split())
    assert exit_code == "130"


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
