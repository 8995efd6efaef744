"""Strictness for every test: an implicit change of rank is an error, as every warning is (pyproject.toml).

And what makes them fast: most of their time is XLA's, which compiles many programs that run for a moment.
"""

import collections
import contextlib
import functools
import gc
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import psutil
import pytest
import tiers
from costs import Costs
from jax._src.interpreters import mlir
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from patience import Patience

from jspec.drafting import drawing
from jspec.engine.aot_cache import costs as aot_costs
from jspec.engine.aot_cache import executables as aot_executables
from jspec.engine.aot_cache import files as aot_files
from jspec.engine.runner.compile import Program
from jspec.pallas.dispatch import traced_for_backend

# XLA compiles small programs faster as one piece of code than as many, and with its older emitter for CPUs, which only jax
# 0.10 still has: an unknown flag ends the process.
HASTE = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    HASTE += " --xla_cpu_use_fusion_emitters=false"

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # frames take a tenth of the time of files that trace most
jax.config.update("jax_num_cpu_devices", 8)  # for models in shards; everything else runs on the first of them
os.environ["XLA_FLAGS"] = f"{HASTE} {os.environ.get('XLA_FLAGS', '')}".rstrip()  # the user's come last, and win
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub; tests/hub has a stand-in for it
gc.set_threshold(20_000)  # new objects before garbage is looked for, in place of 700: a trace makes a million
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jspec-tests-")  # where ``jspec.load`` keeps compiled programs

MOST_MAPPINGS = 20_000  # after a file of tests; one adds up to 10,000
MOST_MEMORY = 3 * 2**30  # bytes that files of tests leave behind
MODULES_OF_A_CONTEXT = 100  # whose constants it keeps
DAYS_KEPT = 7  # of a compiled program, which nobody may need any more
SERVED = ("bench", "serving")  # folders whose tests ask a server of the shipped models for hundreds of texts
ON_ONE_PLATFORM = ("convert", "drafting", "engine", "loading", "lossless", "real", "recipes", "train")
LONGEST = ("lossless", "engine", "train")  # folders whose files take a minute or more


def is_in(path: Path, *folders: str) -> bool:
    """Whether a file of tests is in one of these folders of tests/, at any depth."""
    return path.relative_to(Path(__file__).parent).parts[0] in folders


def pytest_addoption(parser):
    choices = ("float32", "bfloat16")
    parser.addoption("--logits", choices=choices, default="float32", help="as tests/lossless has its models store them")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Costs(config))
    config.pluginmanager.register(Patience())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what tests/nightly.toml names. Long files go first: ``make test`` deals whole files to its workers in this order,
    and they end together."""
    entries, seen = tiers.table(), collections.Counter()
    for item in items:
        long = item.get_closest_marker("long") or item.get_closest_marker("gpu")
        node = f"{item.path.relative_to(tiers.TESTS)}::{item.nodeid.partition('::')[2]}"
        if not long and tiers.is_nightly(node, seen[node.partition("[")[0]], entries):
            item.add_marker(pytest.mark.nightly)
        seen[node.partition("[")[0]] += not long
        tiers.COLLECTED.append(node)
    items.sort(key=lambda item: not is_in(item.path, *LONGEST))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Modules and tests, a million objects, live until the end: no collection of garbage looks at them again."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    gc.unfreeze()  # hypothesis, imported at the end, asks who refers to an object, which no frozen one answers


@pytest.fixture(scope="session", autouse=True)
def programs_kept(pytestconfig):
    """Compiled programs are kept in ``.pytest_cache``, for all workers and for the next run.

    JAX finds them by all that a compilation depends on: the program, the options, the versions of XLA and the machine.
    Tests that count compilations count these as well. A folder that ``JAX_COMPILATION_CACHE_DIR`` names is used instead.
    On a GPU it is compilation, too, that is tested.
    """
    cache = getattr(pytestconfig, "cache", None)  # which ``-p no:cacheprovider`` takes away
    if cache is None or jax.config.jax_compilation_cache_dir is not None or jax.default_backend() != "cpu":
        yield
        return
    folder = cache.mkdir("programs")
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another worker does the same
            if file.stat().st_mtime < time.time() - DAYS_KEPT * 24 * 3600:
                file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LRUCache, "put", put_as_a_whole)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax_cache.reset_cache()  # modules of tests may have compiled something
        yield


def put_as_a_whole(cache: LRUCache, key: str, value: bytes):
    """As JAX does it, but no other worker ever reads half of an entry, and nor does the run after one that is killed."""
    with tempfile.NamedTemporaryFile(dir=cache.path, delete=False) as file:
        file.write(value)
    os.replace(file.name, cache.path / f"{key}-cache")


@pytest.fixture(scope="session", autouse=True)
def contexts_shared() -> Iterator[None]:
    """MLIR's context of a module takes longer to make than a small program's module: each is lent to several of them."""
    make, lent = mlir.make_ir_context, itertools.count()

    @functools.cache
    def made(_: int):
        made.cache_clear()
        return make()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir, "make_ir_context", lambda: made(next(lent) // MODULES_OF_A_CONTEXT))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_left_to_the_next_start():
    """What engines would leave in that folder is not for tests, which count what is traced and measured."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (aot_executables, aot_costs):
            patch.setattr(module, "file_of", lambda *_: None)
        yield


@pytest.fixture
def left_to_the_next_start(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder of JAX's compilation cache, in which engines leave things to the next start."""
    for module in (aot_executables, aot_costs):
        monkeypatch.setattr(module, "file_of", aot_files.file_of)
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 1e9}
    before = {name: getattr(jax.config, name) for name in settings}  # JAX itself keeps nothing there
    for name, value in settings.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture(scope="session")
def memory_when_tidy() -> list[int]:
    """The memory of the process, in bytes, when ``left_behind`` last tidied up."""
    return [psutil.Process().memory_info().rss]


@pytest.fixture(scope="module", autouse=True)
def left_behind(memory_when_tidy):
    """What a file of tests leaves in JAX's caches: millions of objects of all files, which make every collection of garbage
    take seconds. They are left out of collections until there are too many.

    A compiled program also keeps pieces of memory mapped, of which Linux gives a process 65,530; XLA aborts at the
    next."""
    yield
    mappings, process = Path("/proc/self/maps"), psutil.Process()
    many = mappings.exists() and mappings.read_text().count("\n") > MOST_MAPPINGS
    if many or process.memory_info().rss > memory_when_tidy[0] + MOST_MEMORY:
        if "engines" in sys.modules:
            sys.modules["engines"].drop_shared()
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
        memory_when_tidy[0] = process.memory_info().rss
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def compiled_anew(request):
    """What XLA makes for a GPU that is not here is looked at, never run."""
    if not is_in(request.path, "compiled"):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    jax_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def compiled_in_a_hurry(request):
    """Programs of most tests compile for seconds and run for a moment: XLA optimises little, and a drafter's passes are a
    loop (``tests/drafting/test_draft_loops.py`` compares it with unrolled passes). The losslessness suite unrolls
    them as users do; its long tier, and its files that say ``RUNS_FOR_LONG``, run for longer than they compile, and so do
    servers of the shipped models. Kernels are tested on a GPU as users have them."""
    on_gpu = is_in(request.path, "pallas") and jax.default_backend() != "cpu"
    lossless = is_in(request.path, "lossless")
    for_long = lossless and (
        request.config.option.markexpr == "long" or getattr(request.module, "RUNS_FOR_LONG", False)
    )
    if on_gpu or for_long or is_in(request.path, "compiled", *SERVED):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        if not lossless:
            patch.setattr(drawing, "UNROLLED_PASSES", 1)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def traced_for_one_platform(request):
    """Kernels of GPUs are not traced where programs run, and are lowered for no GPU."""
    with traced_for_backend() if is_in(request.path, *ON_ONE_PLATFORM) else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module")
def states_in_chunks() -> Iterator[None]:
    """Gated delta nets read prompts in chunks of few tokens."""
    from requests_and_engines import chunks_of_states

    with chunks_of_states():
        yield


@pytest.fixture(scope="module")
def small_groups() -> Iterator[None]:
    """Every shard has some of the few tokens of a small vocabulary, and the last has padding behind them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jspec.config.sharding.VOCABULARY_GROUP", 8)
        yield


@pytest.fixture
def traced(monkeypatch) -> list[str]:
    """The names of an engine's programs, as they are traced."""
    names, lower = [], Program._lower
    monkeypatch.setattr(Program, "_lower", lambda self, *args: names.append(self.name) or lower(self, *args))
    return names


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
