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


@pytest.fixture(scope="session")
def load() -> Iterator[Any]:
    """``jspec.load`` of a model by its name, or of a path, in float32 and without the folder's defaults of sampling. The
    newest engine is kept: tests that want the same one stand together."""

    @functools.lru_cache(1)
    def loaded(target: str | Path, draft: str | Path | None = None, **how) -> jspec.LLM:
        gc.collect()  # the weights of the engine that went
        options = {"dtype": "float32", "max_len": MAX_LEN, "max_batch": 8, "generation_config": "jspec"} | how
        return jspec.load(folder(target) if isinstance(target, str) else target, draft, **options)

    yield loaded
    loaded.cache_clear()
    gc.collect()


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Callable[..., Path]:
    """What ``jspec-convert`` makes of a model, by its name and the options."""

    @functools.cache
    def convert(name: str, *options: str) -> Path:
        out = tmp_path_factory.mktemp("converted") / name
        assert main([str(folder(name)), str(out), *options]) == 0
        return out

    return convert
