"""What the MLP of an expert does between its two products."""

import jax
import jax.numpy as jnp


def gated(gate, up, clamp: float | None = None, activation: str = "silu"):
    """``activation(gate) * up``, where the activation is ``silu`` or ``gelu_tanh``, or with ``clamp`` c that of gpt-oss
    (OpenAI, 2025).

    That is ``g sigmoid(1.702 g) (u + 1)``, where g is the gate, at most c, and u is up, between -c and c."""
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    if clamp is None:
        return gate * jax.nn.sigmoid(gate) * up
    gate = jnp.where(gate > clamp, clamp, gate)  # NaN stays, unlike in a minimum of Triton
    up = jnp.where(up > clamp, clamp, jnp.where(up < -clamp, -clamp, up))
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
