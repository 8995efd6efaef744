"""Sums over GPUs in the kernel that needs them: arithmetic anywhere, lowering for a GPU, and packets on two real ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of
from jax.sharding import PartitionSpec

from jspec.models.sharding import mesh_of
from jspec.pallas.collectives import peer_sum
from jspec.pallas.collectives.peer_sum import KINDS, peer_sum_kernel, peer_sum_reference
from jspec.pallas.collectives.workspace import Peers, Workspace

EPS, AXIS = 1e-5, "model"
WIDTHS = (2048, 2880, 4096, 5120, 8192)


def arguments(tokens: int, D: int, dtype, n: int = 3):
    """x, every device's y, and the weight."""
    keys = jax.random.split(jax.random.key(D + tokens), 3)
    x, weight = jax.random.normal(keys[0], (tokens, D), dtype), jax.random.normal(keys[2], (D,), dtype)
    return x, jax.random.normal(keys[1], (n, tokens, D), dtype), weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [64, 96, 160])  # two of them are no powers of two
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_interpreted_kernel_agrees_with_the_reference(dtype, D, kind, monkeypatch):
    monkeypatch.setattr(peer_sum, "MOST_BLOCKS", 2)  # so that blocks have two tokens, and one of them one
    peer_sum._launch.clear_cache()
    x, parts, weight = arguments(3, D, dtype)
    expected = jax.vmap(lambda y: peer_sum_reference(x, y, weight, EPS, kind, AXIS), axis_name=AXIS)(parts)
    addresses, epoch = jnp.zeros((len(parts), 2), jnp.int32), jnp.array([7], jnp.int32)
    found = [
        peer_sum._launch(
            *(x, y, weight, addresses, jnp.array([rank], jnp.int32), epoch, parts, EPS, kind, 3 * D), interpret=True
        )
        for rank, y in enumerate(parts)
    ]
    peer_sum._launch.clear_cache()
    for rank, (new, normed, following) in enumerate(found):
        np.testing.assert_array_equal(new, expected[0][rank])
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-2  # one rounding
        np.testing.assert_allclose(*(a.astype(jnp.float32) for a in (normed, expected[1][rank])), rtol=tolerance)
        assert following.tolist() == [8]
        assert np.array_equal(new, found[0][0])
        assert np.array_equal(normed, found[0][1])


@pytest.mark.parametrize(("D", "n"), [(2048, 2), (2880, 2), (4096, 4), (5120, 8), (8192, 2)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernel_lowers_for_a_gpu(dtype, D, n):
    x, parts, weight = arguments(5, D, dtype, n)
    args = x, parts[0], weight, jnp.zeros((n, 2), jnp.int32), jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)

    def launch(*args):
        return peer_sum._launch(*args, None, EPS, "rms", 5 * D, interpret=False)

    assert kernels_of(for_cuda(launch, args)) == ["peer_sum"]


def test_too_small_a_workspace_is_refused():
    x, parts, weight = arguments(5, 64, jnp.float32)
    with pytest.raises(ValueError, match="5 tokens of 64 words: the workspace has room for 319 words"):
        peer_sum._launch(x, parts[0], weight, None, None, None, None, EPS, "rms", 319, interpret=True)


needs_two = pytest.mark.skipif(jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="packets need two GPUs")


def on_every_device(mesh, words: int):
    """The results of the kernel on every device."""

    def on_one(x, y, weight, addresses, epoch):
        found = peer_sum_kernel(x, y[0], weight, Peers.of(addresses, AXIS), epoch, EPS, "rms", words)
        return jax.tree.map(lambda array: array[None], found)

    same, split = PartitionSpec(), PartitionSpec(AXIS)
    specs = same, split, same, same, same
    return jax.jit(jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False))


def by_definition(x, parts, weight) -> tuple[np.ndarray, np.ndarray]:
    """What the reference says, in NumPy: XLA may leave roundings to bfloat16 out."""
    x, parts, weight, dtype = np.asarray(x), np.asarray(parts, np.float32), np.asarray(weight, np.float32), x.dtype
    new = (x.astype(np.float32) + (parts[0] + parts[1])).astype(dtype)
    wide = new.astype(np.float32)
    return new, wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPS) * weight


@pytest.mark.gpu
@needs_two
class TestOnTwoGPUs:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    @pytest.mark.parametrize("D", WIDTHS)
    def test_results_are_those_of_the_definition_and_equal_on_all(self, D, dtype):
        mesh = mesh_of(2, AXIS)
        workspace = Workspace.create(mesh, 100 * D)
        epoch = jnp.ones(1, jnp.int32)
        for tokens in (1, 3, 80, 100):  # the last are more than there are blocks
            x, parts, weight = arguments(tokens, D, dtype, 2)
            args = x, parts, weight, workspace.addresses, epoch
            new, normed, following = on_every_device(mesh, 100 * D)(*args)
            expected, expected_normed = by_definition(x, parts, weight)
            np.testing.assert_array_equal(new[0], new[1])
            np.testing.assert_array_equal(normed[0], normed[1])
            np.testing.assert_array_equal(new[0], expected)
            tolerance = 1e-5 if dtype == jnp.float32 else 2e-2  # two roundings
            np.testing.assert_allclose(normed[0].astype(jnp.float32), expected_normed, rtol=tolerance, atol=tolerance)
            epoch = following[0]

    def test_many_sums_with_delays_on_either_device(self):
        """Every device knows what the other one sends, so that nothing but the packets brings them together."""
        D, sizes, rounds = 2880, (1, 5, 16, 80), 25_000
        mesh = mesh_of(2, AXIS)
        workspace = Workspace.create(mesh, 80 * D)

        def sent(epoch, rank, tokens):
            place = jnp.arange(tokens * D, dtype=jnp.int32).reshape(tokens, D)
            return ((place * 31 + epoch * 17 + rank * 7) % 127).astype(jnp.bfloat16)

        def one_device(addresses, epoch):
            peers = Peers.of(addresses, AXIS)
            rank = peers.rank[0]

            def one_round(_, carry):
                epoch, wrong, noise = carry
                for tokens in sizes:
                    turns = (epoch[0] * 7919 + rank * 104_729) % 23
                    noise = jax.lax.fori_loop(0, jnp.where(turns < 4, 5 * turns, 0), lambda _, x: x @ x, noise)
                    y = [sent(epoch[0], device, tokens) for device in range(2)]
                    own = jnp.where(rank == 0, y[0], y[1]) + (0 * noise[:1, :1]).astype(jnp.bfloat16)
                    x, weight = jnp.zeros((tokens, D), jnp.bfloat16), jnp.ones(D, jnp.bfloat16)
                    new, _, epoch = peer_sum_kernel(x, own, weight, peers, epoch, EPS, "rms", 80 * D)
                    wrong += jnp.sum(new != y[0] + y[1])
                return epoch, wrong, noise

            noise = jnp.eye(256, dtype=jnp.float32)
            epoch, wrong, _ = jax.lax.fori_loop(0, rounds, one_round, (epoch, jnp.int32(0), noise))
            return epoch, wrong[None]

        over = jax.shard_map(
            one_device,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=(PartitionSpec(), PartitionSpec(AXIS)),
            check_vma=False,
        )
        epoch, wrong = jax.jit(over)(workspace.addresses, jnp.ones(1, jnp.int32))
        assert wrong.tolist() == [0, 0]
        assert epoch.tolist() == [1 + rounds * len(sizes)]
