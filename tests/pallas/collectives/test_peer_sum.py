"""Sums over GPUs in the kernel that needs them: arithmetic anywhere, lowering for a GPU, and packets on two real ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of
from jax.sharding import PartitionSpec
from normals import normal
from packets import AXIS, GPUS, assert_epochs_are_read_before_they_are_counted, exchange_of, over_devices

from jspec.models.sharding import mesh_of
from jspec.pallas.collectives import peer_sum
from jspec.pallas.collectives.mailboxes import interleaved
from jspec.pallas.collectives.peer_sum import KINDS, Stream, num_trips, peer_sum_kernel, peer_sum_reference
from jspec.pallas.collectives.peers import MOST_TOKENS, Peers, room_for
from jspec.pallas.collectives.workspace import MOST_BLOCKS, Room, Workspace, are_lost, lost, who_was_late
from jspec.pallas.matmul.partial_sums import PartialSums

EPS, LOST = 1e-5, lost(2, 7)
WIDTHS = (2048, 2880, 4096, 5120, 8192)
HOW = {"eps": EPS, "kind": "rms"}


def arguments(tokens: int, D: int, dtype, n: int = 3, Y: int = 1):
    """The residual stream, every device's summands ``[n, tokens, Y, D]``, and a bias."""
    rng = np.random.default_rng(D + tokens)
    x, weight, summands, bias = (normal(rng, shape, dtype) for shape in ((tokens, D), D, (n, tokens, Y, D), D))
    return Stream(x, weight), summands, bias


@pytest.fixture
def two_blocks(monkeypatch):
    """So that blocks have two tokens, and one of them one."""
    monkeypatch.setattr(peer_sum, "MOST_BLOCKS", 2)
    peer_sum._launch.clear_cache()
    yield
    peer_sum._launch.clear_cache()


def interpreted(summands, bias, stream, exchange, kind="rms", dtype=None) -> list:
    """What the kernel returns on every device."""
    dtype = jnp.dtype(dtype or summands.dtype)
    y = [PartialSums(part, bias, AXIS) for part in summands]
    parts = jnp.stack([part.of_shard(dtype) for part in y])
    ranks = jnp.arange(len(y), dtype=jnp.int32)[:, None]
    how = {"dtype": dtype, "eps": EPS, "kind": kind, "interpret": True}
    return [peer_sum._launch(part, stream, exchange, rank, parts, **how) for part, rank in zip(y, ranks, strict=True)]


def references(summands, bias, stream, exchange, kind="rms", dtype=None):
    """The same of the reference implementation, with an axis of devices in front."""

    def one(part):
        how = {"dtype": dtype or summands.dtype, "eps": EPS, "kind": kind}
        return peer_sum_reference(PartialSums(part, bias, AXIS), stream, exchange, **how)

    return jax.vmap(one, axis_name=AXIS)(summands)


def wide(x) -> np.ndarray:
    return np.asarray(x, np.float32)


@pytest.mark.usefixtures("two_blocks")
class TestInterpreted:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("D", "Y", "biased"), [(64, 1, False), (96, 2, True), (160, 3, False)])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_kernel_agrees_with_the_reference(self, dtype, D, Y, biased, kind):
        stream, summands, bias = arguments(3, D, dtype, Y=Y)
        bias, exchange = bias if biased else None, exchange_of(3, Room(3, D), peer_sum.MOST_BLOCKS)
        (expected, expected_normed), epochs = references(summands, bias, stream, exchange, kind)
        found = interpreted(summands, bias, stream, exchange, kind)
        exact = dtype == jnp.float32 and not biased
        for rank, ((new, normed), following) in enumerate(found):
            tolerance = 1e-5 if dtype == jnp.float32 else 3e-2  # the reference rounds the sum before it adds it
            np.testing.assert_allclose(wide(new), wide(expected[rank]), rtol=tolerance, atol=tolerance * (not exact))
            np.testing.assert_allclose(wide(normed), wide(expected_normed[rank]), rtol=tolerance, atol=tolerance)
            assert np.array_equal(wide(new), wide(found[0][0][0]))
            assert np.array_equal(wide(normed), wide(found[0][0][1]))
            assert following[:2].tolist() == [2, 2]
        assert np.all(epochs == 2)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_total_alone(self, dtype):
        _, summands, bias = arguments(3, 96, dtype, Y=2)
        exchange = exchange_of(3, Room(4, 96), peer_sum.MOST_BLOCKS)
        expected, _ = references(summands, bias, None, exchange)
        for total, _ in interpreted(summands, bias, None, exchange):
            np.testing.assert_allclose(wide(total), wide(expected[0]), rtol=1e-2, atol=2e-2)

    def test_summands_may_be_wider_than_the_result(self):
        stream, summands, _ = arguments(3, 96, jnp.bfloat16, Y=2)
        summands, exchange = summands.astype(jnp.float32) * 1.001, exchange_of(3, Room(4, 48), peer_sum.MOST_BLOCKS)
        (expected, _), _ = references(summands, None, stream, exchange, dtype=jnp.bfloat16)
        for (new, _), _ in interpreted(summands, None, stream, exchange, dtype=jnp.bfloat16):
            np.testing.assert_allclose(wide(new), wide(expected[0]), rtol=1e-2, atol=3e-2)

    @pytest.mark.parametrize("with_stream", [False, True])
    def test_a_block_that_has_lost_a_packet_stays_lost(self, with_stream):
        stream, summands, _ = arguments(3, 64, jnp.float32)
        exchange = exchange_of(3, Room(3, 64), peer_sum.MOST_BLOCKS)
        exchange = dataclasses.replace(exchange, epochs=exchange.epochs.at[1].set(LOST))
        result, epochs = interpreted(summands, None, stream if with_stream else None, exchange)[0]
        for array in result if with_stream else [result]:
            broken = np.isnan(wide(array))
            assert np.all(broken[1])  # the token of block 1
            assert not np.any(broken[[0, 2]])
        assert epochs[:2].tolist() == [2, LOST]
        assert are_lost(epochs)
        assert not are_lost(epochs[:1])


def test_too_small_a_workspace_is_refused():
    stream, summands, _ = arguments(5, 64, jnp.float32)
    for room in (Room(4, 64), Room(5, 63)):
        with pytest.raises(
            ValueError, match=f"5 tokens of 64 words: the workspace has room for {room[0]} of {room[1]}"
        ):
            interpreted(summands, None, stream, exchange_of(3, room, peer_sum.MOST_BLOCKS))


@pytest.mark.parametrize(
    ("shape", "dtype", "axis", "served"),
    [
        ((MOST_TOKENS, 1, 64), jnp.float32, AXIS, True),
        ((MOST_TOKENS + 1, 1, 64), jnp.float32, AXIS, False),
        ((2, 3, 8, 64), jnp.float32, AXIS, True),
        ((1, 1, 66), jnp.float32, AXIS, False),  # wider than the residual stream
        ((1, 1, 64), jnp.float32, None, False),  # one device has all
        ((1, 1, 64), jnp.bfloat16, AXIS, False),  # less than the residual stream's
    ],
)
def test_which_sums_are_served(shape, dtype, axis, served):
    sums = Peers(None, None, None, room_for(64, jnp.float32, 2), AXIS)
    y = PartialSums(jax.ShapeDtypeStruct(shape, dtype), None, axis)
    assert sums.can_sum(y, jnp.float32) == served


def test_wide_tokens_are_served_where_each_has_a_block():
    sums = Peers(None, None, None, room_for(8192, jnp.bfloat16, 4), AXIS)
    for tokens, served in ((MOST_BLOCKS, True), (MOST_BLOCKS + 1, False)):
        y = PartialSums(jax.ShapeDtypeStruct((tokens, 1, 8192), jnp.bfloat16), None, AXIS)
        assert sums.can_sum(y, jnp.bfloat16) == served


def test_an_odd_number_of_halves_is_not_served():
    sums = Peers(None, None, None, room_for(64, jnp.bfloat16, 2), AXIS)
    assert sums.can_sum(PartialSums(jax.ShapeDtypeStruct((1, 1, 64), jnp.float32), None, AXIS), jnp.bfloat16)
    assert not sums.can_sum(PartialSums(jax.ShapeDtypeStruct((1, 1, 64), jnp.float16), None, AXIS), jnp.float16)
    even, odd = (PartialSums(jax.ShapeDtypeStruct((1, 1, D), jnp.bfloat16), None, AXIS) for D in (62, 63))
    assert sums.can_sum(even, jnp.bfloat16)
    assert not sums.can_sum(odd, jnp.bfloat16)


@pytest.mark.parametrize(("width", "of_thread"), [(4096, 4), (1440, 2), (1026, 1), (1026, 4), (96, 8)])
def test_packets_have_a_place_each(width, of_thread):
    places = interleaved(jnp.arange(width), width, of_thread)
    assert sorted(places.tolist()) == list(range(width))


@pytest.mark.parametrize(("D", "n", "Y"), [(2048, 2, 1), (2880, 2, 4), (4096, 4, 2), (5120, 8, 1), (8192, 2, 8)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("with_stream", [False, True])
def test_kernel_lowers_for_a_gpu(with_stream, dtype, D, n, Y):
    trips = num_trips(D * dtype.dtype.itemsize // 4, n) if Y < 4 else 1
    stream, summands, bias = arguments(5, D, dtype, n, Y)
    rank, exchange = jnp.ones(1, jnp.int32), exchange_of(n, room_for(D, dtype, 2), peer_sum.MOST_BLOCKS)

    def launch(y, bias, stream, exchange, rank):
        y = PartialSums(y, bias, AXIS)
        return peer_sum._launch(
            y, stream, exchange, rank, None, dtype=jnp.dtype(dtype), trips=trips, **HOW, interpret=False
        )

    summands = summands.astype(jnp.float32) if Y == 4 else summands  # as those of products with split-K
    args = summands[0], bias if Y > 1 else None, stream if with_stream else None, exchange, rank
    lowered = for_cuda(launch, args)
    assert kernels_of(lowered) == ["peer_sum"]
    assert_epochs_are_read_before_they_are_counted(lowered)


def on_every_device(stream, summands, bias, exchange, trips: int = 1):
    """The results of the kernel on every device, and the next exchange."""

    def on_one(stream, summands, bias, exchange):
        y, rank = PartialSums(summands[0], bias, AXIS), jax.lax.axis_index(AXIS).astype(jnp.int32).reshape(1)
        result, epochs = peer_sum_kernel(y, stream, exchange, rank, dtype=stream.x.dtype, trips=trips, **HOW)
        return jax.tree.map(lambda array: array[None], (result, epochs))

    same, split = PartitionSpec(), PartitionSpec(AXIS)
    result, epochs = over_devices(on_one, (same, split, same, same), split, len(summands))(
        stream, summands, bias, exchange
    )
    return result, dataclasses.replace(exchange, epochs=epochs[0])


def by_definition(stream, summands, bias) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel computes, in NumPy: XLA may leave roundings to bfloat16 out."""
    dtype = stream.x.dtype
    parts = functools.reduce(np.add, np.moveaxis(wide(summands), 2, 0)).astype(dtype).astype(np.float32)
    total = functools.reduce(np.add, parts)
    new = (wide(stream.x) + (total if bias is None else total + wide(bias))).astype(dtype)
    normed = wide(new) / np.sqrt(np.mean(wide(new) ** 2, axis=-1, keepdims=True) + EPS) * wide(stream.weight)
    return new, normed


@pytest.mark.gpu
@pytest.mark.parametrize("n", GPUS)
class TestOnSeveralGPUs:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    @pytest.mark.parametrize("D", WIDTHS)
    def test_results_are_those_of_the_definition_and_equal_on_all(self, D, dtype, n):
        workspace = Workspace.create(mesh_of(n, AXIS), room_for(D, dtype, n))
        exchange = workspace.exchange()
        for tokens, Y, biased in ((1, 1, True), (3, 4, False), (80, 2, True), (100, 1, False)):  # 100 > MOST_BLOCKS
            stream, summands, bias = arguments(tokens, D, dtype, n, Y)
            bias = bias if biased else None
            (new, normed), exchange = on_every_device(stream, summands, bias, exchange)
            expected, expected_normed = by_definition(stream, summands, bias)
            (again, _), exchange = on_every_device(stream, summands, bias, exchange, trips=2)
            for gpu in range(n):
                np.testing.assert_array_equal(new[0], new[gpu])
                np.testing.assert_array_equal(normed[0], normed[gpu])
                np.testing.assert_array_equal(new[0], again[gpu])
            if Y < 3:  # else sums in another order
                np.testing.assert_array_equal(new[0], expected)
            tolerance = 1e-5 if dtype == jnp.float32 else 3e-2  # two roundings
            np.testing.assert_allclose(wide(normed[0]), expected_normed, rtol=tolerance, atol=tolerance)
        assert exchange.epochs[0] == 1 + 3 * 4
        assert exchange.epochs[MOST_BLOCKS - 1] == 1 + 3

    @pytest.mark.parametrize("rounds", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
    def test_many_sums_with_delays_on_any_device(self, rounds, n):
        """Every device knows what the others send, so that nothing but the packets brings them together."""
        D, sizes = 2880, (1, 5, 16, 80, 33, 2, 61, 9, 47, 16)
        trips = num_trips(D // 2, n)
        workspace = Workspace.create(mesh_of(n, AXIS), room_for(D, jnp.bfloat16, n))  # which has to live until the end

        def sent(epoch, rank, tokens):
            place = jnp.arange(tokens * D, dtype=jnp.int32).reshape(tokens, 1, D)
            return ((place * 31 + epoch * 17 + rank * 7) % 127).astype(jnp.bfloat16)

        def one_device(exchange):
            sums = Peers.begin(exchange, AXIS)
            rank, weight = sums.rank[0], jnp.ones(D, jnp.bfloat16)

            def one_round(_, carry):
                wrong, noise = carry
                for tokens in sizes:
                    epoch = sums.epochs[...][0]
                    turns = (epoch * 7919 + rank * 104_729) % 23
                    noise = jax.lax.fori_loop(0, jnp.where(turns < 4, 5 * turns, 0), lambda _, x: x @ x, noise)
                    y = jnp.stack([sent(epoch, device, tokens) for device in range(n)])
                    own = y[rank] + (0 * noise[:1, :1]).astype(jnp.bfloat16)[None]
                    x = jnp.zeros((tokens, D), jnp.bfloat16)
                    new, _ = sums.add_norm(x, PartialSums(own, None, AXIS), weight, EPS, "rms")
                    wrong += jnp.sum(new != jnp.sum(y.astype(jnp.float32), axis=0).astype(jnp.bfloat16)[:, 0])
                return wrong, noise

            wrong, _ = jax.lax.fori_loop(0, rounds, one_round, (jnp.int32(0), jnp.eye(256, dtype=jnp.float32)))
            return sums.exchange(), wrong[None]

        out_specs = PartitionSpec(), PartitionSpec(AXIS)
        exchange, wrong = over_devices(one_device, PartitionSpec(), out_specs, n)(workspace.exchange())
        assert wrong.tolist() == [0] * n
        assert exchange.epochs[0] == 1 + rounds * len(sizes) * trips

    def test_an_exception_on_one_device_fails_the_call_and_not_the_next_one(self, n):
        """What one device's program raises ends it before it sends. The others wait for a while, then all are free."""
        workspace, failing = Workspace.create(mesh_of(n, AXIS), room_for(2048, jnp.bfloat16, n)), [True]

        def on_host(rank):
            if rank == 1 and failing[0]:
                raise RuntimeError("device 1 fails")
            return np.float32(0)

        def one_device(exchange):
            peers = Peers.begin(exchange, AXIS)
            zero = jax.pure_callback(on_host, jax.ShapeDtypeStruct((), jnp.float32), peers.rank[0])
            own = jnp.ones((4, 1, 2048), jnp.bfloat16) * (1 + peers.rank[0]) + zero.astype(jnp.bfloat16)
            total = peers.total(PartialSums(own, None, AXIS), jnp.bfloat16)
            return total[None]

        call = over_devices(one_device, PartitionSpec(), PartitionSpec(AXIS), n)
        with pytest.raises(jax.errors.JaxRuntimeError, match="device 1 fails"):
            jax.block_until_ready(call(workspace.exchange()))
        failing[0], workspace = False, workspace.renewed()
        assert np.all(wide(call(workspace.exchange())) == n * (n + 1) / 2)

    @pytest.mark.parametrize("trips", [1, 2])
    def test_a_device_that_waits_in_vain_gives_up(self, trips, n):
        """Another device has another epoch, and so never sends what this one waits for."""
        stream, summands, _ = arguments(3, 2048, jnp.bfloat16, n)
        workspace = Workspace.create(mesh_of(n, AXIS), room_for(2048, jnp.bfloat16, n))

        def one_device(stream, summands, exchange):
            sums = Peers.begin(exchange, AXIS)
            ahead = (jnp.arange(MOST_BLOCKS) == 1) & (sums.rank[0] == n - 1)
            sums.epochs[...] = jnp.where(ahead, 3, sums.epochs[...])  # of block 1 of one device
            y = PartialSums(summands[0], None, AXIS)
            for _ in range(1000):  # which would take half an hour if each of them waited
                how = {"dtype": jnp.bfloat16, "trips": trips, **HOW}
                (new, _), sums.epochs[...] = peer_sum_kernel(y, stream, sums.exchange(), sums.rank, **how)
            return new[None], sums.exchange().epochs[None]

        specs = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec()
        over = over_devices(one_device, specs, PartitionSpec(AXIS), n)
        new, epochs = over(stream, summands, workspace.exchange())
        for device in range(n):
            assert np.all(np.isnan(wide(new[device, 1])))
            assert not np.any(np.isnan(wide(new[device])[[0, 2]]))
            assert are_lost(epochs[device])
        assert who_was_late(epochs) == (n - 1, list(range(n - 1)))
