"""The command line of a child process that runs a module of jspec."""

import json
import sys

_CODE = """import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.exit(importlib.import_module(sys.argv[2]).main(*sys.argv[3:]))"""


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line of a process that calls ``main`` of a module and exits with its return value.

    The process has this one's ``sys.path``, so it imports nothing from the working directory that this one would not. It
    does not run this process's main module again.

    Args:
      module: full name of the module.
      *arguments: of ``main``.
    """
    return [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path), module, *arguments]
