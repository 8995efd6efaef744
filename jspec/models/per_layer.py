"""Per-layer inputs (Gemma 3n, 2025; Gemma 4, 2026): numbers of each token that one layer alone reads.

A table has Wl numbers for each token and layer, which are gathered and never multiplied. The projection of the token's
embedding is added to them. A layer gates them by its residual stream, and adds what it makes of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig
from jspec.models.layers import ACTIVATE, Linear, Norm, looked_up, random_params, times
from jspec.pallas.sums import add


class LayerInputs(nnx.Module):
    """The per-layer inputs of all layers.

    Attributes:
      table: ``[Vl, L Wl]``, the numbers of each token, layer after layer. It is never quantised, and every shard has it.
      projection: from embeddings to the same numbers, ``[L Wl, D]``.
      norm: over the numbers of one layer, of the projection alone.
    """

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        sizes, Wl = config.dimensions, config.per_layer_inputs
        assert Wl is not None
        self.layers, self.width = config.num_layers, Wl
        self.table = random_params(rngs, (sizes["Vl"], self.layers * Wl), 0.02, dtype=dtype).numbers
        self.projection = Linear(config.hidden_size, self.layers * Wl, dtype=dtype, rngs=rngs)
        self.norm = Norm(Wl, config.rms_norm_eps, config.norm, dtype=dtype)

    def __call__(self, tokens, embedded) -> jax.Array:
        """``[L, B, T, Wl]``, of int32 tokens ``[B, T]`` and their embeddings ``[B, T, D]``, the first layer's inputs."""
        shape = *tokens.shape, self.layers, self.width
        scale = float(np.asarray(self.width**0.5).astype(self.table.dtype))  # rounded, as that of embeddings is
        stored = times(looked_up(self.table[...], tokens).reshape(shape), scale)
        projected = times(self.projection(embedded), embedded.shape[-1] ** -0.5).reshape(shape)
        return jnp.moveaxis(times(add(self.norm(projected), stored), 2**-0.5), 2, 0)


class OwnInputs(nnx.Module):
    """What a layer makes of its per-layer inputs: ``out(activation(gate x) * inputs)``, ``[B, T, D]``.

    Attributes:
      gate: ``[Wl, D]``; out: ``[D, Wl]``.
      norm: over D, of the result, before the layer adds it.
    """

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        Wl, D = config.dimensions["Wl"], config.hidden_size
        self.activation = config.activation
        self.gate, self.out = Linear(D, Wl, dtype=dtype, rngs=rngs), Linear(Wl, D, dtype=dtype, rngs=rngs)
        self.norm = Norm(D, config.rms_norm_eps, config.norm, dtype=dtype)

    def __call__(self, x, inputs) -> jax.Array:
        """Arguments: the residual stream ``[B, T, D]``, and the inputs ``[B, T, Wl]``."""
        return self.out(ACTIVATE[self.activation](self.gate(x)) * inputs)
