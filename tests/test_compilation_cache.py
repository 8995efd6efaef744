"""Where compiled programs are kept between processes, and that the next process finds them there."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jspec import compilation_cache
from jspec.compilation_cache import CompilationCacheWarning, enable_compilation_cache

ROOT = Path(__file__).parent.parent
FOLDER, LEAST_TIME = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty home, and a JAX that nobody has configured; both are put back afterwards."""
    for variable in ("XDG_CACHE_HOME", FOLDER.upper(), LEAST_TIME.upper()):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(compilation_cache, "_chosen", None)
    before = {name: getattr(jax.config, name) for name in (FOLDER, LEAST_TIME, "jax_enable_compilation_cache")}
    jax.config.update(FOLDER, None)
    jax.config.update(LEAST_TIME, 1.0)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def configured() -> tuple[str | None, float]:
    return jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs


def compile_something():
    jax.jit(lambda x: x + 1)(np.zeros(3, np.float32))


def test_the_folder_is_in_the_users_cache(home, monkeypatch):
    folder = enable_compilation_cache()
    assert folder == home / ".cache" / "jspec" / "xla"
    assert configured() == (str(folder), 0)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ones/are/ignored")
    assert enable_compilation_cache() == folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert enable_compilation_cache() == home / "elsewhere" / "jspec" / "xla"


def test_programs_land_there_though_others_were_compiled_before(home):
    compile_something()
    folder = enable_compilation_cache()
    assert not list(folder.iterdir())
    compile_something()
    assert len(list(folder.iterdir())) == 1
    other = enable_compilation_cache(home / "other")  # JAX has opened the first by now
    compile_something()
    assert (len(list(folder.iterdir())), len(list(other.iterdir()))) == (1, 1)


def test_a_path_is_used_whatever_is_configured(home, monkeypatch):
    jax.config.update(FOLDER, str(home / "theirs"))
    monkeypatch.chdir(home)
    assert enable_compilation_cache("ours") == home / "ours"
    assert enable_compilation_cache(Path("~/homely")) == home / "homely"
    assert configured()[0] == str(home / "homely")


def test_false_changes_nothing(home):
    assert enable_compilation_cache(False) is None
    assert configured() == (None, 1)
    assert not list(home.iterdir())


def test_users_configuration_takes_precedence(home, monkeypatch):
    jax.config.update(FOLDER, str(home / "theirs"))
    assert enable_compilation_cache() is None
    assert configured() == (str(home / "theirs"), 1)
    jax.config.update(FOLDER, None)
    monkeypatch.setenv(FOLDER.upper(), "")  # as after os.environ[..] = .. in a program that has imported JAX
    assert enable_compilation_cache() is None
    assert configured() == (None, 1)
    monkeypatch.delenv(FOLDER.upper())
    assert enable_compilation_cache() is not None
    jax.config.update(FOLDER, str(home / "theirs"))  # later, after jspec
    assert enable_compilation_cache() is None
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compilation_cache(home / "ours") is None
    assert not list(home.glob("ours"))


@pytest.mark.parametrize("by_environment", [False, True])
def test_users_threshold_takes_precedence(monkeypatch, by_environment):
    if by_environment:
        monkeypatch.setenv(LEAST_TIME.upper(), "1.0")
    else:
        jax.config.update(LEAST_TIME, 0.5)
    assert enable_compilation_cache() is not None
    assert configured()[1] == (1 if by_environment else 0.5)


@pytest.mark.parametrize("how", ["a file is in the way", "read-only"])
def test_unusable_folder_gets_a_warning(home, how):
    folder = home / "file" / "xla" if how == "a file is in the way" else Path("/proc/self/fd")
    (home / "file").write_text("")
    with pytest.warns(CompilationCacheWarning, match=rf"{folder}.*pass a folder that can be written") as caught:
        assert enable_compilation_cache(folder) is None
    assert caught[0].filename == __file__
    assert configured() == (None, 1)
    compile_something()


def test_a_user_without_a_home_gets_a_warning(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.warns(CompilationCacheWarning, match="Could not determine home directory.*set XDG_CACHE_HOME"):
        assert enable_compilation_cache() is None


@pytest.mark.parametrize("folder", [None, 0, 1, 0.5, "", b"x", [], "a\0b"])
def test_a_cache_that_names_no_folder_is_refused(folder):
    before = configured()
    with pytest.raises(ValueError, match=r"^compilation_cache=.*: expected True, False or the path of a local folder$"):
        enable_compilation_cache(folder)
    assert configured() == before


def test_remote_folders_are_refused():
    with pytest.raises(ValueError, match=r"'gs://bucket/xla': expected a local folder; .* JAX_COMPILATION_CACHE_DIR"):
        enable_compilation_cache("gs://bucket/xla")


def start(home: Path, **environment: str) -> list[str]:
    """Run a toy program in a process; returns its hits, its misses and its result."""
    code = """
        import jax
        import jax.numpy as jnp
        from jspec.compilation_cache import enable_compilation_cache
        from jspec.engine.runner.compile import Program, compile_all

        events = []
        jax.monitoring.register_event_listener(lambda event, **_: events.append(event.split("/")[-1]))
        jnp.arange(3) * 2  # compiled before, as programs of the user's may be
        enable_compilation_cache()
        shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        programs = [Program(lambda x, n=n: (jnp.sin(x @ x) + n, x.sum()), 0, name=f"K={n}") for n in range(3)]
        compile_all([(program, (shape,)) for program in programs])
        print(events.count("cache_hits"), events.count("cache_misses"))
        state = jax.device_put(jnp.full((4, 4), 0.25))
        for program in programs:
            state, total = program(state)
        print(total)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(home), **environment}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""  # XLA has no complaint about what it finds either
    return done.stdout.splitlines()


def test_a_second_start_compiles_nothing(home):
    first, second = start(home), start(home)
    assert (first[0], second[0]) == ("0 3", "3 0")
    assert first[1] == second[1]
    assert list((home / ".cache" / "jspec" / "xla").glob("jit_K*"))
    elsewhere = start(home, JAX_COMPILATION_CACHE_DIR=str(home / "theirs"))
    assert elsewhere[0] == "0 0"  # with the user's folder and JAX's threshold
