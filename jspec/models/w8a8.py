"""W8A8 products of drafters: where weights are int8, the inputs are quantised to int8, too.

Tensor cores then multiply integers, and no weight has to be converted on its way to them: that conversion, not the
memory, bounds a product of 16 tokens and more with weights of eight bits. A drafter may do so because the text has the
target's distribution whatever it proposes. A target never does.

Each token has one scale for all of its numbers, so a few large numbers take away the precision of the others. The
residual stream of language models has such numbers. Therefore the outputs of norms, attention and activations are
quantised, and not the residual stream and the target's features, which the first maps of draft heads read. (The output
head of an EAGLE head reads an estimate of the target's normed hidden state.)"""

from typing import Any

import jax.numpy as jnp

from jspec.models.flatten import copied


def with_quantized_inputs(drafter: Any, *, head: bool = True, concatenated: bool = False) -> Any:
    """A copy of a drafter that quantises the inputs of products with int8 weights, with the same arrays.

    Args:
      drafter: has ``layers``, which are ``jspec.models.decoder_layer.Layer`` or modules with its parts, and a ``head``,
        which is a ``Linear`` map from hidden states to logits or None.
      head: whether the head's inputs are quantised, too.
      concatenated: whether the normed residual stream is concatenated with another input before attention reads it.
    """
    drafter = copied(drafter)
    for layer in drafter.layers:
        mlp = layer.mlp
        if getattr(layer, "delta_net", None) is None:
            _quantize_inputs_of_attention(layer, concatenated)
        else:  # the map to betas and decays, which has floats, reads the norm's outputs as well
            _quantize_inputs_of(layer.delta_net.qkvz)
            _quantize_inputs_of(layer.delta_net.out)
        if hasattr(mlp, "router"):  # experts have kernels of their own
            continue
        _quantize_inputs_of(mlp.down)
        if layer.mlp_norm is not None:
            convolved = hasattr(layer, "mlp_conv")  # which reads the norm's outputs before the MLP does
            first = mlp.up if mlp.gate_up is None else mlp.gate_up
            _quantize_inputs_of(first, None if convolved else layer.mlp_norm)
    if head:
        _quantize_inputs_of(drafter.head)
    return drafter


def _quantize_inputs_of_attention(layer: Any, concatenated: bool):
    attention = layer.attention
    _quantize_inputs_of(getattr(attention, "queries", None))
    _quantize_inputs_of(attention.out)
    first = getattr(attention, "qkv", None) or attention.compress
    if not hasattr(layer, "attention_norm"):  # its own norms come before, one of them for each part of the inputs
        _quantize_inputs_of(first)
    elif layer.attention_norm is not None:
        _quantize_inputs_of(first, None if concatenated else layer.attention_norm)


def _quantize_inputs_of(linear: Any, norm: Any = None) -> None:
    """Have one map quantise its inputs if its weights are int8 without groups, and its norm quantise its outputs if no other
    map reads them."""
    if linear is None or linear.weight.dtype != jnp.int8 or linear.scale.ndim > 1:
        return
    linear.quantize_inputs = True
    if norm is not None:
        norm.quantize_outputs = True
