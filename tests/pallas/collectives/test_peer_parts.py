"""Parts from every GPU in one launch: what is interpreted anywhere, lowering for a GPU, and packets on two real ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of
from jax.sharding import PartitionSpec
from packets import AXIS, GPUS, assert_epochs_are_read_before_they_are_counted, exchange_of, over_devices

from jspec.models.sharding import mesh_of
from jspec.pallas.collectives import peer_parts
from jspec.pallas.collectives.peer_parts import CHUNK, peer_parts_reference
from jspec.pallas.collectives.peers import MOST_WORDS, Peers, room_for
from jspec.pallas.collectives.workspace import Room, Workspace, are_lost, lost

N, LOST = 3, lost(2, 7)
ROOM = Room(2, 4, 5 * CHUNK)
SIZES = (1, CHUNK, 4 * CHUNK + 7)  # words; the last are more chunks than there are blocks


@pytest.fixture
def two_blocks(monkeypatch):
    monkeypatch.setattr(peer_parts, "MOST_BLOCKS", 2)
    peer_parts._launch.clear_cache()
    yield
    peer_parts._launch.clear_cache()


def sent_by_all(words: int, same: bool) -> jax.Array:
    """What every device sends, int32 ``[N, 1 or N, words]``."""
    shape = N, 1 if same else N, words
    return jax.random.randint(jax.random.key(words), shape, -(2**31), 2**31 - 1, jnp.int32)


@pytest.mark.usefixtures("two_blocks")
@pytest.mark.parametrize("words", SIZES)
@pytest.mark.parametrize("same", [True, False])
def test_interpreted_kernel_agrees_with_the_reference(same, words):
    sent, exchange = sent_by_all(words, same), exchange_of(N, ROOM, peer_parts.MOST_BLOCKS)
    expected, epochs = jax.vmap(lambda x: peer_parts_reference(x, exchange, AXIS), axis_name=AXIS)(sent)
    for rank in range(N):
        to_it = sent[:, 0 if same else rank]
        found, following = peer_parts._launch(sent[rank], exchange, jnp.array([rank], jnp.int32), to_it, interpret=True)
        np.testing.assert_array_equal(found, expected[rank])
        np.testing.assert_array_equal(found, to_it)
        blocks = min(-(-words // CHUNK), 2)
        assert following[:blocks].tolist() == [2] * blocks
        assert following[blocks:2].tolist() == [1] * (2 - blocks)
    assert np.all(epochs[:, : min(-(-words // CHUNK), 2)] == 2)


@pytest.mark.usefixtures("two_blocks")
def test_a_block_that_has_lost_a_packet_stays_lost():
    sent, exchange = sent_by_all(2 * CHUNK, True), exchange_of(N, ROOM, peer_parts.MOST_BLOCKS)
    exchange = dataclasses.replace(exchange, epochs=exchange.epochs.at[0].set(LOST))
    _, epochs = peer_parts._launch(sent[0], exchange, jnp.zeros(1, jnp.int32), sent[:, 0], interpret=True)
    assert epochs[:2].tolist() == [LOST, 2]


def test_too_small_a_workspace_is_refused():
    with pytest.raises(ValueError, match=f"a part of 9 words: the workspace has room for {8}"):
        peer_parts._launch(
            sent_by_all(9, True)[0], exchange_of(N, Room(1, 1, 8), peer_parts.MOST_BLOCKS), None, None, interpret=True
        )


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("same", [True, False])
def test_kernel_lowers_for_a_gpu(same, n):
    exchange = exchange_of(n, room_for(4096, jnp.bfloat16, n), peer_parts.MOST_BLOCKS)
    x = jnp.zeros((1 if same else n, 100_000), jnp.int32)

    def launch(x, exchange, rank):
        return peer_parts._launch(x, exchange, rank, None, interpret=False)

    lowered = for_cuda(launch, (x, exchange, jnp.ones(1, jnp.int32)))
    assert kernels_of(lowered) == ["peer_parts"]
    assert_epochs_are_read_before_they_are_counted(lowered)


@pytest.mark.parametrize(
    ("shape", "dtype", "served"),
    [
        ((MOST_WORDS // 2,), jnp.float32, True),
        ((MOST_WORDS // 2 + 1,), jnp.float32, False),
        ((4, 5, MOST_WORDS // 20), jnp.bfloat16, True),
        ((3, 7), jnp.bfloat16, False),  # half a word is left
        ((3, 7), jnp.int32, True),
        ((8,), jnp.uint8, False),
    ],
)
def test_which_parts_are_served(shape, dtype, served):
    assert Peers(None, None, None, room_for(64, jnp.float32, 2), AXIS).serve_parts(shape, dtype) == served


@pytest.mark.gpu
@pytest.mark.parametrize("n", GPUS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_parts_come_on_several_gpus(dtype, n):
    """Between sums of other sizes, which use the same epochs."""
    workspace = Workspace.create(mesh_of(n, AXIS), room_for(2048, jnp.bfloat16, n))

    def one_device(exchange):
        peers, wrong = Peers.begin(exchange, AXIS), jnp.int32(0)

        def of(gpu, i, shape):
            places = jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)
            return ((places * 7 + gpu * 11 + i) % 251).astype(dtype)

        def one(i, wrong):
            for shape in ((n, 2), (n, 16, 200_704 // n), (n, 3, 5000)):
                each = jnp.stack([of(gpu, i, shape[1:]) for gpu in range(n)])
                wrong += jnp.sum(peers.all_gather(each[peers.rank[0]]) != each)
                sent = jnp.stack([of(gpu, i, shape) for gpu in range(n)])  # by each, to all
                wrong += jnp.sum(peers.all_to_all(sent[peers.rank[0]]) != sent[:, peers.rank[0]])
            return wrong

        wrong = jax.lax.fori_loop(0, 3000, one, wrong)
        return peers.exchange(), wrong[None]

    over = over_devices(one_device, PartitionSpec(), (PartitionSpec(), PartitionSpec(AXIS)), n)
    exchange, wrong = over(workspace.exchange())
    assert wrong.tolist() == [0] * n
    assert not are_lost(exchange.epochs)
    assert exchange.epochs[0] == 1 + 3000 * 6
