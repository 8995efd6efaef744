"""The kernels of exchanges among 2 to 8 simulated devices, each of which runs its own and waits for the packets of the
others; and who is named when one of them is late."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from normals import normal
from packets import AXIS, SimulatedPackets, over_devices
from tiers import in_tiers

from jspec.pallas.collectives import peer_parts, peer_sum
from jspec.pallas.collectives.peer_sum import Stream, num_trips
from jspec.pallas.collectives.workspace import MOST_BLOCKS, Room, are_lost, lost, who_was_late
from jspec.pallas.matmul.partial_sums import PartialSums

TOKENS, EXCHANGES, WORDS = 3, 4, 1030
SUM = {"dtype": jnp.dtype("float32"), "eps": 1e-5, "kind": "rms", "interpret": True}
# 6 devices do not divide 40 words, so that each of them adds up all words itself.
CASES = [(2, 48, 1), (4, 48, 2), (6, 48, 2), (6, 40, 1), (8, 48, 2), (8, 48, 1)]
QUICK = [(2, 48, 1), (6, 40, 1), (8, 48, 2)]


@pytest.fixture
def simulated(monkeypatch):
    """``SimulatedPackets``, which the kernels of this test send."""

    def made(*args) -> SimulatedPackets:
        packets = SimulatedPackets(*args)
        packets.take_part(monkeypatch)
        return packets

    launches = peer_sum._launch, peer_parts._launch
    for launch in launches:
        launch.clear_cache()
    yield made
    for launch in launches:
        launch.clear_cache()


def exchanged(packets: SimulatedPackets, one, n: int, *arrays):
    """Of every device the results of some exchanges, and its epochs.

    Args:
      one: (this device's part of each array, number, exchange, rank) -> the result of an exchange, and the epochs.
      arrays: of which each device has one entry.
    """

    def one_device(arrays, exchange):
        rank = jax.lax.axis_index(AXIS).astype(jnp.int32)
        begin = packets.begin(rank)

        def step(epochs, number):
            own = [array[0] for array in arrays]
            result, epochs = one(*own, number + begin, dataclasses.replace(exchange, epochs=epochs), rank[None])
            return epochs, result

        epochs, results = jax.lax.scan(step, exchange.epochs, jnp.arange(EXCHANGES, dtype=jnp.int32))
        return results[None], epochs[None]

    split = PartitionSpec(AXIS)
    found = over_devices(one_device, (split, PartitionSpec()), split, n)(arrays, packets.exchange)
    return jax.tree.map(np.asarray, found)


def sums_of(packets: SimulatedPackets, n: int, D: int, trips: int):
    """Of every device the sums of some exchanges, and its epochs; and what the sums are by definition."""
    rng = np.random.default_rng(n)
    x, weight, parts = (normal(rng, shape, jnp.float32) for shape in ((TOKENS, D), D, (n, TOKENS, D)))

    def one(part, number, exchange, rank):
        y = PartialSums(part[:, None] + number.astype(jnp.float32), None, AXIS)
        (new, _), epochs = peer_sum._launch(y, Stream(x, weight), exchange, rank, None, trips=trips, **SUM)
        return new, epochs

    expected = []
    for number in np.arange(EXCHANGES, dtype=np.float32):
        total = np.asarray(parts[0]) + number
        for part in np.asarray(parts[1:]):  # in the order of the devices, whoever owns a word
            total = total + (part + number)
        expected.append(np.asarray(x) + total)
    return *exchanged(packets, one, n, parts), np.stack(expected)


@pytest.mark.parametrize("case", in_tiers(CASES, QUICK), ids=str)
def test_sums_are_those_of_the_definition_on_every_device(simulated, case):
    n, D, trips = case
    sums, epochs, expected = sums_of(simulated(n, Room(TOKENS, D), MOST_BLOCKS), n, D, trips)
    assert trips <= num_trips(D, n)
    assert np.all(sums == expected)
    assert np.all(epochs[:, :TOKENS] == 1 + EXCHANGES * trips)
    assert not are_lost(epochs)


@pytest.mark.parametrize("n", in_tiers([2, 4, 6, 8], [6]))
@pytest.mark.parametrize("same", [True, False], ids=["gathered", "of each for each"])
def test_parts_come_from_every_device(simulated, n, same):
    words = np.random.default_rng(n).integers(-100, 100, (n, 1 if same else n, WORDS), np.int32)

    def one(part, number, exchange, rank):
        return peer_parts._launch(part + number, exchange, rank, None, interpret=True)

    found, epochs = exchanged(simulated(n, Room(1, 1, WORDS), MOST_BLOCKS), one, n, words)
    for device in range(n):
        for number in range(EXCHANGES):
            np.testing.assert_array_equal(found[device, number], words[:, 0 if same else device] + number)
    assert np.all(epochs[:, :2] == 1 + EXCHANGES)


@pytest.mark.parametrize("late", [0, -1])
@pytest.mark.parametrize("case", in_tiers(CASES, QUICK[::2]), ids=str)
def test_the_device_that_is_late_is_named(simulated, case, late):
    """It begins when the others have given up, finds what they sent, and then waits for them in vain, too."""
    n, D, trips = case
    late %= n
    sums, epochs, expected = sums_of(simulated(n, Room(TOKENS, D), MOST_BLOCKS, late), n, D, trips)
    others = [device for device in range(n) if device != late]
    assert np.all(np.isnan(sums[others, :, 0]).any(axis=-1))  # the token of block 0, in every exchange
    assert np.all(np.isnan(sums[late, 1:, 0]).any(axis=-1))
    assert trips == 2 or np.all(sums[late, 0, 0] == expected[0, 0])
    assert np.all(epochs[others, 0] == lost(late, 1))
    assert epochs[late, 0] < lost(late, 1)
    assert who_was_late(epochs) == (late, others)


def test_the_earliest_loss_tells_who_was_late():
    epochs = np.full((3, 4), 9)
    epochs[:, 2] = lost(0, 2**24 + 9), lost(0, 2**24 + 8), lost(2, 2**24 + 7)
    epochs[:, 3] = lost(1, 5), 9, lost(1, 5)
    assert who_was_late(epochs) == (2, [2])
    assert who_was_late(epochs[:, 3:]) == (1, [0, 2])
