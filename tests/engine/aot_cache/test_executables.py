"""The executable cache: a later process reads the right executables, and none of another key."""

import dataclasses
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    CONFIG,
    GREEDY,
    TARGET,
    decode,
    draft,
    drafting,
    key_of,
    plain_greedy,
    ragged_prompts,
    target,
    tokens_of,
)

from jspec.compilation_cache import CompilationCacheWarning
from jspec.config import Shards, Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.aot_cache.executables import DAYS_KEPT, ExecutableCache
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.runner.compile import Program, compile_all
from jspec.models import flat_params
from jspec.models.sharding import build_shards, mesh_of, on_every_device
from jspec.sampling.verify import RULES

SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)
PROMPTS = ragged_prompts()


@pytest.fixture
def folder(left_to_the_next_start):
    return left_to_the_next_start


def doubled(fingerprint: object | None = "doubled", name: str = "double", options=None) -> Program:
    program = Program(lambda x: 2 * x, 0, options, name)
    program.cache = ExecutableCache(fingerprint)
    return program


def files(folder):
    return sorted(folder.glob("jspec-*.program"))


def test_cached_executable_is_neither_traced_nor_compiled(folder, traced):
    doubled().compile(SHAPE)
    assert traced == ["double"]
    again = doubled()
    compile_all([(again, (SHAPE,))])
    assert traced == ["double"]
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(again(x), [0, 2, 4])
    assert x.is_deleted()  # the donated buffer


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="GPUs' programs can be serialized again")
def test_executable_from_jax_cache_is_not_cached_on_cpu(folder, traced):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    doubled("before").compile(SHAPE)
    assert len(files(folder)) == 1
    for count in (2, 3):  # new code of jspec, the same program for XLA
        after = doubled("after")
        after.compile(SHAPE)
        np.testing.assert_array_equal(after(jnp.arange(3.0)), [0, 2, 4])
        assert len(traced) == count
    assert len(files(folder)) == 1


def test_compiled_program_reads_no_file(folder, monkeypatch):
    program = doubled()
    program.compile(SHAPE)
    monkeypatch.setattr(ExecutableCache, "file", lambda *_: pytest.fail("its name takes longer than a call"))
    program.compile(SHAPE)


@pytest.mark.parametrize(
    ("other", "shape"),
    [
        ({"fingerprint": "something else"}, SHAPE),
        ({"name": "twice"}, SHAPE),
        ({"options": {"xla_cpu_enable_fast_math": True}}, SHAPE),
        ({}, jax.ShapeDtypeStruct((4,), jnp.float32)),
        ({}, jax.ShapeDtypeStruct((3,), jnp.int32)),
        ({"fingerprint": None}, SHAPE),
    ],
    ids=str,
)
def test_a_program_of_another_key_is_compiled(folder, traced, other, shape):
    doubled().compile(SHAPE)
    doubled(**other).compile(shape)
    assert len(traced) == 2


def test_settings_of_jax_are_part_of_the_key(folder, traced):
    doubled().compile(SHAPE)
    with jax.default_matmul_precision("float32"):
        compile_all([(doubled(), (SHAPE,))])  # in threads that do not have this setting
    assert len(traced) == len(files(folder)) == 2


def test_code_of_jspec_is_part_of_the_key(folder, traced, monkeypatch):
    doubled().compile(SHAPE)
    monkeypatch.setattr("jspec.engine.aot_cache.files._code", lambda: "a line was changed")
    doubled().compile(SHAPE)
    assert len(traced) == 2


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x80\x05N."], ids=["empty", "nonsense", "None"])
def test_damaged_file_is_reported_and_replaced(folder, traced, data):
    doubled().compile(SHAPE)
    (file,) = files(folder)
    file.write_bytes(data)
    with pytest.warns(CompilationCacheWarning, match="'double' is compiled again"):
        doubled().compile(SHAPE)
    doubled().compile(SHAPE)
    assert len(traced) == 2


def test_unwritable_folder_is_reported(folder):
    compiled = jax.jit(lambda x: 2 * x).lower(SHAPE).compile()
    jax.config.update("jax_compilation_cache_dir", str(folder / "absent"))
    program = doubled()
    with pytest.warns(CompilationCacheWarning, match="the next process compiles program 'double' again"):
        program.cache.write(program.file(SHAPE), "double", compiled)


def test_without_jax_cache_nothing_is_cached(folder, traced):
    jax.config.update("jax_compilation_cache_dir", None)
    doubled().compile(SHAPE)
    doubled().compile(SHAPE)
    assert len(traced) == 2
    assert not files(folder)


def test_executable_unread_for_days_is_deleted(folder):
    doubled().compile(SHAPE)
    doubled(name="twice").compile(SHAPE)
    long_ago = time.time() - (DAYS_KEPT + 1) * 24 * 3600
    for file in files(folder):
        os.utime(file, (long_ago, long_ago))
    doubled().compile(SHAPE)  # finds it, so it is needed
    doubled(name="thrice").compile(SHAPE)
    assert [file.name.split("-")[1] for file in files(folder)] == ["double", "thrice"]


def engine(settings: Speculation = Speculation(2), config=CONFIG, shards: Shards | None = None) -> Engine:  # noqa: B008
    model, by = target(), draft()
    if shards is not None:
        mesh = mesh_of(shards.count, shards.axis)
        model, by = build_shards(TARGET, flat_params(model), "float32", shards, mesh), on_every_device(by, mesh)
    return Engine(model, by, Decoding(drafter_for(TARGET, TARGET, settings), settings.verify), config)


@pytest.mark.parametrize("shards", [None, Shards(2)], ids=["one device", "two shards"])
def test_engine_with_cached_executables_writes_the_same_texts(folder, traced, shards):
    keys = [key_of(seed) for seed in range(len(PROMPTS))]
    first = engine(shards=shards)
    first.warmup()
    assert len(traced) == first.num_compilations == len(files(folder))
    wanted = tokens_of(decode(first, PROMPTS, GREEDY, keys))
    del traced[:]
    second = engine(shards=shards)
    second.warmup()
    assert traced == []
    assert tokens_of(decode(second, PROMPTS, GREEDY, keys)) == wanted == plain_greedy(target(), PROMPTS)
    assert second.num_compilations == first.num_compilations


@pytest.mark.parametrize(
    "other",
    [
        {"settings": Speculation(2, "match")},
        {"settings": Speculation(2, draft_temperature=0.5)},
        {"settings": Speculation(2, lookup=True)},
        {"config": dataclasses.replace(CONFIG, rounds=CONFIG.rounds + 1)},
        {"shards": Shards(2)},
    ],
    ids=str,
)
def test_engine_settings_are_part_of_the_key(folder, other):
    cache, others = (one.runner.batch.programs.admit.cache for one in (engine(), engine(**other)))
    assert cache.file("x", None, (SHAPE,)) != others.file("x", None, (SHAPE,))
    assert cache.file("x", None, (SHAPE,)) == engine().runner.batch.programs.admit.cache.file("x", None, (SHAPE,))


def test_expert_sharding_is_part_of_the_key(folder):
    """Their arrays have the same shapes and lie in the same places."""
    in_parts, whole = (engine(shards=Shards(2, by_expert=by_expert)).runner for by_expert in (False, True))
    shapes = [[(leaf.shape, leaf.sharding) for leaf in runner.batch.leaves[0]] for runner in (in_parts, whole)]
    assert shapes[0] == shapes[1]
    cache, others = (runner.batch.programs.admit.cache for runner in (in_parts, whole))
    assert cache.file("x", None, (SHAPE,)) != others.file("x", None, (SHAPE,))


def their_rule(logits, warp, proposal, noise):
    return RULES["match"](logits, warp, proposal, noise)


@pytest.mark.parametrize(
    "rule", [their_rule, functools.partial(RULES["match"], decide=their_rule)], ids=["rule", "part"]
)
def test_user_defined_rule_is_never_cached(rule, monkeypatch):
    monkeypatch.setitem(RULES, "theirs", rule)
    assert engine(Speculation(2)).runner.batch.programs.admit.cache._fingerprint is not None
    make = drafter_for(TARGET, TARGET, Speculation(2))
    theirs = Engine(target(), draft(), Decoding(make, "theirs"), CONFIG)
    assert theirs.runner.batch.programs.admit.cache._fingerprint is None


def test_user_defined_drafter_is_never_cached():
    """``drafting`` makes a function, whose code is not part of the cache key."""
    own = Engine(target(), draft(), Decoding(drafting("draft_model", Speculation(2)), "rejection"), CONFIG)
    assert own.runner.batch.programs.admit.cache._fingerprint is None
