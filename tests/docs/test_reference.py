"""Every public object has an example in its docstring, and the examples work.

Public are the names that ``jspec`` exports and those that docs/reference documents. An example is the indented code behind
``Example::`` in a docstring. It sees the names of the module that defines the object, and ``jspec``. An example that reads
a checkpoint, at ``path/to`` something, is compiled and not run.
"""

import ast
import builtins
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import jspec

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@functools.cache
def documented() -> dict[str, Any]:
    """Path -> object, of every object that docs/reference documents; of a module, its members that are listed there."""
    objects = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for path, members in re.findall(
            r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", page.read_text(), re.M
        ):
            thing = resolve(path)
            names = [f"{path}.{name}" for name in members.split(", ")] if inspect.ismodule(thing) else [path]
            objects |= {name: resolve(name) for name in names}
    return objects


def resolve(path: str) -> Any:
    """The module, or the object of a module, with this dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def public() -> dict[str, Any]:
    exported = {f"jspec.{name}": getattr(jspec, name) for name in jspec.__all__ if name != "__version__"}
    return documented() | exported


def example_of(thing: Any) -> str | None:
    """The code of its example; None if there is none."""
    _, marked, behind = (inspect.getdoc(thing) or "").partition("Example::\n\n")
    indented = itertools.takewhile(lambda line: not line or line.startswith(" "), behind.splitlines())
    return textwrap.dedent("\n".join(indented)) if marked else None


def unknown_names(code: str, namespace: dict[str, Any]) -> set[str]:
    """Names that an example reads and nothing defines, inside of functions too."""
    nodes = list(ast.walk(ast.parse(code)))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    defined |= {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    return read - defined - namespace.keys() - vars(builtins).keys()


def test_exported_names_are_documented():
    objects = documented().values()
    exported = [name for name in jspec.__all__ if name != "__version__"]
    assert [name for name in exported if not any(getattr(jspec, name) is thing for thing in objects)] == []


def test_every_public_object_has_an_example():
    assert {path for path, thing in public().items() if example_of(thing) is None} == set()


@pytest.mark.parametrize("path", sorted(public()))
def test_the_example_works(path):
    thing = public()[path]
    code = example_of(thing)
    assert code is not None
    namespace = dict(vars(sys.modules[thing.__module__])) | {"jspec": jspec}
    program = compile(code, f"example of {path}", "exec")
    assert unknown_names(code, namespace) == set()
    if "path/to" not in code:
        exec(program, namespace)
