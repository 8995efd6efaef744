"""Strictness for every test: an implicit change of rank is an error, as every warning is (pyproject.toml)."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jspec-tests-")  # where ``jspec.load`` keeps compiled programs

MOST_MAPPINGS = 20_000  # after a file of tests; one adds up to 10,000
LONGEST = ("lossless", "engine", "train")  # folders whose files take a minute or more


def pytest_addoption(parser):
    choices = ("float32", "bfloat16")
    parser.addoption("--logits", choices=choices, default="float32", help="as tests/lossless has its models store them")


def pytest_collection_modifyitems(items):
    """Long files go first: ``make test`` deals whole files to its workers in this order, and they end together."""
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """A compiled program keeps pieces of memory mapped, of which Linux gives a process 65,530; XLA aborts at the
    next."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_text().count("\n") > MOST_MAPPINGS:
        if "engines" in sys.modules:
            sys.modules["engines"].drop_shared()
        gc.collect()
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def compiled_in_a_hurry(request):
    """Most programs of the tests run for a moment and compile for seconds; the losslessness suite's run for long."""
    if request.path.parent.name in ("lossless", "pallas", "compiled"):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def xla_compilations() -> Iterator[list[str]]:
    """Grows by an entry whenever anything at all is compiled, by whomever."""
    compiled: list[str] = []

    def listen(event: str, seconds: float, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)
