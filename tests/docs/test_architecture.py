"""docs/ARCHITECTURE.md is short, and every path and every name of code in it exists."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
JSPEC = ROOT / "jspec"
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
MOST_WORDS = 2000
ARRAYS = re.compile(r"[A-Za-z_\d]* ?\[.*\]|.*[ <>=|()].*|[a-z]_[a-z0-9]|[A-Z]")  # shapes, equations and letters
# What is no name of jspec's Python: options, values and commands, and names of Python and JAX.
ELSEWHERE = re.compile(r'jspec( [\w-]+)*|jspec-convert|"\w+"|(queue|asyncio|jax)\.[\w.]+|RuntimeError|NaN|\+inf')


def quoted() -> set[str]:
    """What stands in backticks in the prose, but for blocks of code."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.S)))


def is_path(name: str) -> bool:
    return (
        name.endswith((".py", ".md", "/")) or re.fullmatch(r"(jspec|tests|docs|benchmarks)/[\w/.]+", name) is not None
    )


@functools.cache
def names() -> dict[str, set[str]]:
    """Every name that a module of jspec gives something (class, function, argument, attribute, constant), and in which."""
    found: dict[str, set[str]] = {}
    for file in JSPEC.rglob("*.py"):
        module = ".".join(file.relative_to(JSPEC).with_suffix("").parts).removesuffix(".__init__")
        for part in module.split("."):
            found.setdefault(part, set()).add(module)
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                    found.setdefault(name, set()).add(module)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.setdefault(name, set()).add(module)
                case ast.Constant(value=str(name)) if name.isidentifier():  # values such as "coupled"
                    found.setdefault(name, set()).add(module)
    return found


def in_one_module(name: str) -> bool:
    """Whether the parts of a dotted name are names of one module of jspec: ``Scheduler.schedule``."""
    parts = [names().get(part.removesuffix("()"), set()) for part in name.removeprefix("jspec.").split(".")]
    return bool(set.intersection(*parts))


def test_page_is_short():
    assert len(PAGE.split()) <= MOST_WORDS


def test_every_path_exists():
    missing = {
        path
        for path in filter(is_path, quoted())
        if not any((folder / path).exists() for folder in (ROOT, JSPEC, JSPEC / "engine", ROOT / "docs"))
    }
    assert missing == set()


def test_every_path_of_the_trees_exists():
    """A line of a block begins with paths of the folder above it, which is indented less."""
    for block in re.findall(r"```\n(.*?)```", PAGE, flags=re.S):
        folders: dict[int, Path] = {-1: ROOT}
        for line in block.splitlines():
            found = re.match(r"( *)((?:[\w/]+(?:\.py|/)(?:, )?)+)( |$)", line)
            if found is None:
                continue
            indent = len(found[1])
            folder = folders[max(level for level in folders if level < indent)]
            for path in found[2].rstrip(", ").split(", "):
                assert (folder / path).exists(), f"{path} in {folder.relative_to(ROOT)}"
                if path.endswith("/"):
                    folders = {level: one for level, one in folders.items() if level < indent} | {indent: folder / path}


def test_every_name_exists():
    asked = {
        name for name in quoted() if not is_path(name) and not ELSEWHERE.fullmatch(name) and not ARRAYS.fullmatch(name)
    }
    assert {name for name in asked if not in_one_module(name)} == set()
