"""The attention kernel for many query tokens against the oracle of ``paged_attention``, and when it is chosen.

jax interprets kernels of this kind since 0.11. Before that, these tests lower the kernel and do not run it. The interpreter
looks for races, and prints those that it finds."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import MOSAIC, for_cuda, interpreted, shapes_of_queries
from paged_problems import FULL, LIVE, SHORT, Case, assert_agrees, assert_nan_stays_in_its_row, problem

from jspec.pallas.attention.paged import paged_attention_reference
from jspec.pallas.attention.parts import Parts
from jspec.pallas.attention.prefill_launch import PrefillLaunch
from jspec.pallas.attention.prefill_sm90 import prefill_attention_kernel
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.table import CHOSEN, TABLE, Attention, paged_attention
from jspec.pallas.dispatch import explain, row_of

CASES = [
    Case(T=64, R=4, H=64, P=64, pages=5, dtype="bfloat16"),  # two blocks, and more tiles than stages
    Case(T=32, R=4, H=128, P=64, pages=5, dtype="bfloat16", window=70),
    Case(T=16, R=8, H=64, P=128, pages=3, dtype="bfloat16", window=200),
    Case(T=128, R=1, H=128, P=64, pages=3, dtype="bfloat16"),
    Case(T=64, R=4, H=64, P=64, pages=3, dtype="bfloat16", scale=0.3),
    Case(T=32, R=8, H=64, P=64, pages=5, dtype="bfloat16", window=128, sink=2.0),
    Case(T=128, R=1, H=64, P=64, pages=3, dtype="bfloat16", sink=1.0),
    Case(T=64, R=2, H=128, P=128, pages=2, dtype="bfloat16", scale=0.3, sink=0.0),
]
MORE_CASES = [  # tiles of 64 slots, or several groups of heads for a KV head
    Case(T=64, R=6, H=256, P=64, pages=3, dtype="bfloat16"),
    Case(T=16, R=8, H=256, P=64, pages=4, dtype="bfloat16", window=70, sink=1.0),
    Case(T=128, R=3, H=64, P=64, pages=3, dtype="bfloat16", sink=2.0),
    Case(T=64, R=6, H=256, P=64, pages=4, dtype="bfloat16", window=100, sink=0.0),
    Case(T=128, R=5, H=128, P=64, pages=4, dtype="bfloat16", window=70),
    Case(T=128, R=7, H=64, P=128, pages=2, dtype="bfloat16", scale=0.3, sink=1.0),
    Case(T=8, R=32, H=64, P=64, pages=3, dtype="bfloat16", sink=1.0),
]


@pytest.fixture(autouse=True)
def no_race(capsys):
    yield
    assert "RACE" not in capsys.readouterr().out


def attend(case: Case, args, one_order: bool = False):
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

    stages, instances = 2, 3  # fewer than tiles, and fewer than blocks
    how = {"num_stages": stages, "instances": instances, "interpret": InterpretGPUParams(detect_races=True)}
    return prefill_attention_kernel(*args, case.spec, one_order=one_order, **how)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_oracle_and_gives_zeros_to_invalid_query_tokens(case):
    args, wanted = problem(case)
    got = attend(case, args)
    assert_agrees(got, args, *wanted)
    np.testing.assert_array_equal(np.asarray(got, np.float32)[~np.asarray(args[-1].valid)], 0)


@interpreted
def test_parts_of_one_and_two_tiles_in_one_order_agree_with_the_oracle(monkeypatch):
    monkeypatch.setattr("jspec.pallas.attention.prefill_launch.PARTS", Parts(64, steps=1))
    case = Case(T=32, R=8, H=64, P=64, pages=5, dtype="bfloat16", window=128, sink=2.0)
    args, wanted = problem(case)
    assert_agrees(attend(case, args, one_order=True), args, *wanted)


@interpreted
@pytest.mark.parametrize("case", MORE_CASES, ids=str)
def test_agrees_with_the_oracle_with_any_number_of_heads_and_with_heads_of_256(case):
    """In two rows: the last tile of one is half full, and the other has invalid query tokens behind valid ones."""
    (q, k, v, queries), wanted = problem(case)
    rows = jnp.array([LIVE, SHORT])
    args = q[rows], k, v, PagedQueries(*(x[rows] for x in queries[:3]))
    got = attend(case, args)
    assert_agrees(got, args, *(x[rows] for x in wanted))
    np.testing.assert_array_equal(np.asarray(got, np.float32)[~np.asarray(args[-1].valid)], 0)


@interpreted
def test_a_chunk_gets_the_same_bits_in_any_row_beside_any_others():
    case = CASES[0]
    (q, k, v, queries), _ = problem(case)
    got = attend(case, (q, k, v, queries))
    order = jnp.asarray([FULL, LIVE])
    others = PagedQueries(*(x[order] for x in queries[:3]))
    other = attend(case, (q[order], k, v, others._replace(valid=others.valid.at[0, 7:].set(False))))
    np.testing.assert_array_equal(other[1], got[LIVE])
    np.testing.assert_array_equal(other[0, :7], got[FULL, :7])


@interpreted
def test_a_nan_that_a_query_token_sees_reaches_it_and_no_other_row():
    assert_nan_stays_in_its_row(attend, Case(T=32, R=4, H=64, P=64, pages=3, dtype="bfloat16"))


@pytest.mark.gpu
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_a_nan_reaches_its_own_row_and_no_other_on_a_gpu(operand):
    case = Case(T=32, R=4, H=64, P=64, pages=3, dtype="bfloat16")
    args, _ = problem(case)
    at = (LIVE, -1, 0, 0) if operand == 0 else (0, args[3].table[LIVE, 0], 3, 0)
    poisoned = [x.at[at].set(jnp.nan) if i == operand else x for i, x in enumerate(args)]

    def attention(args):
        return np.asarray(prefill_attention_kernel(*args, case.spec), np.float32)

    got, clean = attention(poisoned), attention(args)
    assert np.isnan(got[LIVE, -1, 0]).any()
    others = np.arange(len(got)) != LIVE
    np.testing.assert_array_equal(got[others], clean[others])


def shapes(B, T, N=32, G=8, H=128, P=64, dtype="bfloat16"):
    array, M = jax.ShapeDtypeStruct, 1024 // P
    pool, queries = array((G, 1 + B * M, P, H), dtype), array((B, T, N, H), dtype)
    return queries, pool, pool, shapes_of_queries(B, T, M)


@pytest.mark.parametrize(
    ("B", "T", "N", "instances"), [(3, 64, 32, 5), (2, 32, 32, 132), (4, 96, 32, 7), (3, 128, 48, 7)]
)
def test_every_block_has_one_instance(B, T, N, instances):
    q, pool, *_ = shapes(B, T, N)
    launch = PrefillLaunch.of(q, pool, AttentionSpec(), 2, instances, None)
    blocks = [
        tuple(int(x) for x in launch.block(jnp.int32(instance), i))
        for instance in range(launch.instances)
        for i in range(int(launch.blocks_of(instance)))
    ]
    assert sorted(blocks) == sorted(itertools.product(range(B), range(launch.groups), range(launch.blocks)))
    tokens_and_heads = B * launch.blocks * launch.block_tokens * launch.groups * launch.block_heads
    assert tokens_and_heads == B * T * N
    assert [int(launch.kv_head(jnp.int32(group))) for group in (0, launch.groups - 1)] == [0, launch.G - 1]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "shape",
    [
        *[{"B": 8, "T": 64}, {"B": 16, "T": 64, "N": 16, "H": 64, "P": 128}],
        {"B": 8, "T": 64, "N": 24, "G": 4, "H": 256},
        {"B": 4, "T": 128, "N": 28, "G": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("sinks", [False, True])
def test_lowers_for_hopper(shape, window, sinks, monkeypatch):
    monkeypatch.setattr("jspec.pallas.attention.table.on_hopper", lambda: True)
    choose_all(monkeypatch)
    q, *others = shapes(**shape)
    spec = AttentionSpec(window, sinks=jax.ShapeDtypeStruct(q.shape[2:3], q.dtype) if sinks else None)  # pyright: ignore
    text = for_cuda(functools.partial(paged_attention), (q, *others, spec))  # not traced before
    [operands] = re.findall(rf"{MOSAIC}\((.*?)\)", text)
    assert len(operands.split(",")) == (7 if sinks else 6)
    assert "triton" not in text


def choose_all(monkeypatch):
    for H in (64, 128, 256):
        monkeypatch.setitem(CHOSEN, H, range(1, 33))


def test_other_gpus_get_paged_attention(monkeypatch):
    monkeypatch.setattr("jspec.pallas.attention.table.on_hopper", lambda: False)
    text = for_cuda(functools.partial(paged_attention), (*shapes(8, 64), AttentionSpec()))  # not traced before
    assert MOSAIC not in text
    assert "triton" in text


@pytest.mark.parametrize(
    ("shape", "known"),
    [
        *[({"B": 8, "T": 64}, True), ({"B": 64, "T": 32}, True), ({"B": 1, "T": 2048}, True)],
        *[({"B": 64, "T": 40}, False), ({"B": 64, "T": 64, "N": 56}, False), ({"B": 64, "T": 64, "P": 16}, False)],
        *[({"B": 64, "T": 64, "dtype": "float32"}, False), ({"B": 64, "T": 64, "H": 256}, False)],
        ({"B": 64, "T": 128, "N": 56}, False),  # supported and not chosen
        *[({"B": 64, "T": 64, "N": 24, "G": 4, "H": 256}, True), ({"B": 64, "T": 16, "N": 16, "G": 2, "H": 256}, True)],
        ({"B": 2, "T": 64}, False),  # too few instances: splitting the rows is better
    ],
    ids=str,
)
def test_which_shapes_have_the_kernel(shape, known, monkeypatch):
    assert is_chosen(shape, monkeypatch) == known


def is_chosen(shape, monkeypatch, **how) -> bool:
    """Whether a Hopper GPU gets the kernel for many query tokens."""
    monkeypatch.setattr("jspec.pallas.attention.table.on_hopper", lambda: True)
    q, pool, _, queries = shapes(**shape)
    return list(explain(TABLE, Attention(q, pool, queries, AttentionSpec(**how))))[-1] == "many tokens"


def test_other_kernels_say_why_they_are_not_chosen(monkeypatch):
    assert not is_chosen({"B": 8, "T": 64}, monkeypatch, softcap=2.0)
    q, pool, _, queries = shapes(2, 64)
    assert explain(TABLE, Attention(q, pool, queries, AttentionSpec())) == {
        "many tokens over bytes": "the pages that are in use have no limit",
        "many tokens": "2 rows of 64 tokens do not make enough blocks",
        "many tokens in one order": "2 rows of 64 tokens do not make enough blocks",
        "pages": None,
    }


def test_one_order_is_kept_where_tiles_are_those_of_other_kernels(monkeypatch):
    monkeypatch.setattr("jspec.pallas.attention.table.on_hopper", lambda: True)

    def chosen(**shape) -> str:
        q, pool, _, queries = shapes(**{"B": 64, "T": 64, **shape})
        row = row_of(TABLE, Attention(q, pool, queries, AttentionSpec()), one_order=True)
        assert row.order is not None
        return row.name

    assert chosen() == "many tokens in one order"
    assert chosen(N=24, G=4, H=256) == "pages"  # whose tiles have 32 slots of such heads
    assert chosen(P=128) == "pages"


@pytest.mark.parametrize(
    ("shape", "known"),
    [
        *[({"T": 64, "N": 24, "G": 4, "H": 256}, True), ({"T": 16, "N": 16, "G": 2, "H": 256}, True)],
        *[({"T": 128, "N": 28, "G": 4}, True), ({"T": 128, "N": 40}, True), ({"T": 128, "N": 24}, True)],
        *[({"T": 32, "N": 24, "G": 4}, False), ({"T": 64, "N": 28, "G": 4}, False)],  # blocks of 64 and of 128 tokens
        ({"T": 64, "N": 16, "G": 2, "H": 256, "P": 128}, False),  # tiles of 64 slots are half a page
        *[({"T": 64, "H": 96}, False), ({"T": 64, "H": 192}, False)],
    ],
    ids=str,
)
def test_which_shapes_the_kernel_supports(shape, known, monkeypatch):
    choose_all(monkeypatch)
    assert is_chosen({"B": 64, **shape}, monkeypatch) == known


def test_other_platforms_run_the_reference():
    case = CASES[0]
    args, _ = problem(case)
    with jax.default_device(jax.devices("cpu")[0]):
        got, wanted = (jax.jit(f)(*args, case.spec) for f in (paged_attention, paged_attention_reference))
        np.testing.assert_array_equal(got.astype(jnp.float32), wanted.astype(jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "sink"), [(None, None), (100, None), (None, 2.0), (100, 2.0)])
@pytest.mark.parametrize(
    ("T", "R", "H"),
    [(32, 4, 128), (64, 4, 128), (64, 6, 256), (16, 8, 256), (128, 3, 128), (128, 5, 128), (128, 7, 128)],
)
def test_real_sizes_agree_on_a_gpu_among_other_rows_and_alone(T, R, H, window, sink):
    case = Case(T=T, R=R, H=H, P=64, pages=16, dtype="bfloat16", window=window, sink=sink)
    args, wanted = problem(case)
    attend = jax.jit(functools.partial(prefill_attention_kernel, spec=case.spec))
    got = attend(*args)
    assert_agrees(got, args, *wanted)
    order = jnp.roll(jnp.arange(len(got)), 1)
    moved = attend(args[0][order], *args[1:3], PagedQueries(*(x[order] for x in args[3][:3])))
    np.testing.assert_array_equal(moved, got[order])
