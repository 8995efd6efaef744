"""Parameters of gated delta nets in shards: which rows a shard has, and that shards compute the heads of the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import HYBRID, in_shards
from flax import nnx

from jspec.config import DeltaNets, Experts, ModelConfig, Shards
from jspec.config.sharding import AXIS
from jspec.models import Decoder, build, flat_params
from jspec.models.flatten import flatten
from jspec.models.kv_cache import CausalView
from jspec.models.sharding import indices_of, mesh_of

DENSE = dataclasses.replace(HYBRID, delta_nets=DeltaNets(4, 8, 6, 10, 3, (True, True, False)))
MOE = dataclasses.replace(
    DENSE, architecture="Qwen3_5MoeForCausalLM", experts=Experts(4, 2, 8, shared=1, shared_gate=True)
)
INT8 = dataclasses.replace(DENSE, quantization="int8")
CONFIGS = {"dense": DENSE, "experts": MOE, "int8": INT8}
AT = "layers.0.delta_net."


def made(config: ModelConfig) -> Decoder:
    """A module with random decays and norms."""
    model, rng = Decoder(config, rngs=nnx.Rngs(3)), np.random.default_rng(4)
    for layer in model.layers:
        if layer.delta_net is not None:
            for leaf in (layer.delta_net.decay, layer.delta_net.bias, layer.delta_net.norm.weight):
                leaf[...] = leaf[...] + jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
    return model


def parts_of(config: ModelConfig, count: int) -> list[dict[str, np.ndarray]]:
    """The arrays of each shard, by name."""
    shards, params = Shards(count), {n: np.asarray(a) for n, a in flat_params(made(config)).items()}
    splits, parts = shards.splits(config), []
    for shard in range(count):
        own = {}
        for name, array in params.items():
            split = splits[name]
            indices = indices_of(array.shape, split, config.dimensions, shards, shard)
            own[name] = np.concatenate([array[index] for index in indices], axis=split.axis or 0)
        parts.append(own)
    return parts


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("count", [2, 4])
def test_every_number_is_in_one_shard(config, count):
    """But for what is replicated: the norm of outputs, whose size is that of a head."""
    shards, shapes = Shards(count), {name: array.shape for name, array in flat_params(made(config)).items()}
    for name, split in shards.splits(config).items():
        if ".delta_net." not in name:
            continue
        numbers = np.arange(np.prod(shapes[name]), dtype=np.int64).reshape(shapes[name])
        indices = [indices_of(shapes[name], split, config.dimensions, shards, shard) for shard in range(count)]
        held = [np.concatenate([numbers[index].reshape(-1) for index in each]) for each in indices]
        if split.axis is None:
            assert name.endswith(("norm.weight", "out.scale"))
            assert all(np.array_equal(one, numbers.reshape(-1)) for one in held)
        else:
            np.testing.assert_array_equal(np.sort(np.concatenate(held)), numbers.reshape(-1))


def test_a_shard_has_the_queries_keys_values_and_gates_of_its_heads():
    """Heads of values that share a head of keys are in its shard, with their betas, decays and channels."""
    whole, nets = {n: np.asarray(a) for n, a in flat_params(made(DENSE)).items()}, DENSE.delta_nets
    assert nets is not None
    keys, values = nets.key_heads * nets.key_size, nets.value_heads * nets.value_size
    for shard, own in enumerate(parts_of(DENSE, 2)):
        half = [np.arange(n // 2) + shard * n // 2 for n in (keys, values, nets.value_heads)]
        channels = [half[0], keys + half[0], 2 * keys + half[1]]
        rows = np.concatenate([*channels, 2 * keys + values + half[1]])
        np.testing.assert_array_equal(own[f"{AT}qkvz.weight"], whole[f"{AT}qkvz.weight"][rows])
        np.testing.assert_array_equal(own[f"{AT}convolution"], whole[f"{AT}convolution"][np.concatenate(channels)])
        of_heads = np.concatenate([half[2], nets.value_heads + half[2]])
        np.testing.assert_array_equal(own[f"{AT}ba.weight"], whole[f"{AT}ba.weight"][of_heads])
        for name in ("decay", "bias"):
            np.testing.assert_array_equal(own[AT + name], whole[AT + name][half[2]])
        np.testing.assert_array_equal(own[f"{AT}out.weight"], whole[f"{AT}out.weight"][:, half[1]])
        np.testing.assert_array_equal(own[f"{AT}norm.weight"], whole[f"{AT}norm.weight"])


@pytest.mark.parametrize("config", [DENSE, INT8], ids=["float32", "int8"])
@pytest.mark.parametrize("count", [2, 4])
def test_outputs_of_shards_add_up_to_those_of_the_whole(config, count):
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 140, config.hidden_size)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(140, dtype=jnp.int32), (2, 140))
    local = Shards(count).local(config)

    def out(layer):
        return np.asarray(jax.jit(lambda x: layer.delta_net(x, positions, None, CausalView(positions))[0])(x))

    wanted = out(made(config).layers[0])
    assert local.delta_nets == DeltaNets(4 // count, 8 // count, 6, 10, 3, (True, True, False))
    model = Decoder(local, rngs=nnx.Rngs(0))
    found = 0
    for own in parts_of(config, count):
        names = [name for name in own if name.startswith("layers.0.")]
        params = {**flat_params(model), **{name: jnp.asarray(own[name]) for name in names}}
        found = found + out(build(local, params).layers[0])
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_device_has_its_own_bytes_alone(config):
    """And ``weight_bytes``, from which the size of the cache follows, counts them."""
    model = in_shards(made(config), 2)
    for device in mesh_of(2, AXIS).devices.flat:
        held = [s.data.nbytes for leaf in flatten(model).leaves for s in leaf.addressable_shards if s.device == device]
        assert Shards(2).weight_bytes(config, 4) == pytest.approx(sum(held), rel=0.02)


def test_heads_of_keys_that_cannot_be_dealt_out_are_refused():
    nets = dataclasses.replace(DENSE.delta_nets, key_heads=2)
    config = dataclasses.replace(DENSE, delta_nets=nets)
    with pytest.raises(ValueError, match=r"tensor_parallel=4: expected a divisor of delta_nets\.key_heads, 2"):
        Shards(4).local(config)
