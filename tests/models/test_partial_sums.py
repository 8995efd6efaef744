"""Models whose products of few tokens are partial sums, as on a Hopper GPU: their logits are those without split-K."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import LATENTS, TARGET
from flax import nnx
from matmul_rows import set_limits

from jspec.config import Experts
from jspec.models import Decoder, causal_logits
from jspec.models.layers import Linear
from jspec.pallas.matmul.bf16 import bf16_matmul
from jspec.pallas.matmul.partial_sums import PartialSums

WIDE = dataclasses.replace(TARGET, hidden_size=64, intermediate_size=2048, head_dim=256)
TOKENS = 2, 12


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Programs are lowered as for such a GPU, and the products of these small models are of the size for the kernel."""
    set_limits(monkeypatch, "bf16", numbers=range(2**14, 2**26))


def logits(model) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(1).integers(model.config.vocab_size, size=TOKENS), jnp.int32)
    return np.asarray(jax.jit(functools.partial(causal_logits, model))(tokens), np.float64)


def split_maps(model) -> list[str]:
    """The maps whose products are partial sums with so many tokens."""
    names = []
    for path, part in nnx.iter_graph(model):
        if isinstance(part, Linear):
            x = jnp.zeros((*TOKENS, part.weight.shape[1]), part.weight.dtype)
            if isinstance(jax.eval_shape(functools.partial(part), x), PartialSums):  # a new function, traced again
                names.append(str(path[-1]))
    return sorted(names)


@pytest.mark.parametrize(
    ("config", "maps"),
    [
        (WIDE, ["down"] * 3 + ["out"] * 3),
        (dataclasses.replace(WIDE, norm_placement="around"), ["down"] * 3 + ["out"] * 3),
        (dataclasses.replace(WIDE, norm_placement="after"), ["down"] * 3 + ["out"] * 3),
        (dataclasses.replace(WIDE, norm_placement="after_sum"), ["down"] * 3 + ["out"] * 3),
        (dataclasses.replace(WIDE, residual_multiplier=0.5), ["down"] * 3 + ["out"] * 3),
        (dataclasses.replace(WIDE, norm="layer", gated_mlp=False, mlp_bias=True), ["out"] * 3),
        (dataclasses.replace(WIDE, output_bias=True), ["down"] * 3),
        (dataclasses.replace(WIDE, experts=Experts(4, 2, 24)), ["out"] * 3),
        (dataclasses.replace(LATENTS, hidden_size=64, intermediate_size=2048), ["down"] * LATENTS.num_layers),
    ],
    ids=["plain", "around", "after", "after sum", "multiplier", "biases", "output bias", "experts", "latents"],
)
def test_partial_sums_leave_the_logits_the_same(config, maps, monkeypatch):
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert split_maps(model) == maps
    products = []

    def recorded(*args):
        products.append(bf16_matmul(*args))
        return products[-1]

    monkeypatch.setattr("jspec.pallas.matmul.table.bf16_matmul", recorded)
    actual = logits(model)
    assert any(isinstance(y, PartialSums) for y in products)
    for _, part in nnx.iter_graph(model):
        if isinstance(part, Linear):
            part.allow_partial_sums = False
    assert split_maps(model) == []
    wanted = logits(model)
    # Both are sums in float32 of the same numbers in another order, rounded once.
    assert np.sqrt(np.mean((actual - wanted) ** 2)) < 0.02 * np.sqrt(np.mean(wanted**2))
