"""The tier of real models: its marker, and engines and converted folders that tests share."""

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_models import MAX_LEN, folder

import jspec
from convert.cli import main


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.real)


class Engines:
    """``jspec.load`` of a model by its name, or of a path, in float32 and without the folder's defaults of sampling.

    Only the newest engine is kept, and goes before the next one comes: tests that want the same one stand together."""

    def __init__(self):
        self._kept: dict[Any, jspec.LLM] = {}

    def __call__(self, target: str | Path, draft: str | Path | None = None, **how) -> jspec.LLM:
        key = target, draft, *sorted(how.items())
        if key not in self._kept:
            self.clear()
            options = {"dtype": "float32", "max_len": MAX_LEN, "max_batch": 8, "generation_config": "jspec"} | how
            self._kept[key] = jspec.load(folder(target) if isinstance(target, str) else target, draft, **options)
        return self._kept[key]

    def clear(self):
        self._kept.clear()
        gc.collect()


@pytest.fixture(scope="session")
def load() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.clear()


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Callable[..., Path]:
    """What ``jspec-convert`` makes of a model, by its name and the options."""

    @functools.cache
    def convert(name: str, *options: str) -> Path:
        out = tmp_path_factory.mktemp("converted") / name
        assert main([str(folder(name)), str(out), *options]) == 0
        return out

    return convert
