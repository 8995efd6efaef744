"""How a Python process of jspec's own is started beside this one."""

import json
import sys

_CODE = """import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.exit(importlib.import_module(sys.argv[2]).main(*sys.argv[3:]))"""


def python_command(module: str, *arguments: str) -> list[str]:
    """The command of a process that calls ``main`` of a module and ends with what it returns.

    The process finds modules where this one does, and none in the working directory that this one would not. A script
    that is this process's main module is not run again.

    Args:
      module: its full name.
      *arguments: of ``main``.
    """
    return [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path), module, *arguments]
