"""Drafters whose weights are int8 round the inputs of products to int8, too.

Tensor cores then multiply integers, and no weight has to be converted on its way to them: that conversion, and not the
memory, is what bounds a product of 16 tokens and more with weights of eight bits. A drafter may do so because the text has
the target's distribution whatever it proposes. A target never does.

Each token has one scale for all of its numbers, so a few large numbers take away the precision of the others. The residual
stream of language models has such numbers. Therefore products round what a norm, attention or an activation gives, and not
the residual stream and the target's features, which the first maps of draft heads read. (What an EAGLE head's output head
reads is an estimate of the target's normed hidden state.)"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp


def round_inputs(layers: Iterable[Any], *heads: Any, concatenated: bool = False) -> None:
    """Have the decoder layers and output heads of a drafter round what products with weights of int8 read.

    Args:
      layers: ``jspec.models.decoder_layer.Layer``, or modules with its parts.
      heads: ``Linear`` maps from hidden states to logits; None among them is passed over.
      concatenated: whether the normed residual stream is joined with something else before attention reads it.
    """
    for layer in layers:
        attention, mlp = layer.attention, layer.mlp
        _round(getattr(attention, "queries", None))
        _round(attention.out)
        first = getattr(attention, "qkv", None) or attention.compress
        if not hasattr(layer, "attention_norm"):  # its own norms come before, one of them for each part of the inputs
            _round(first)
        elif layer.attention_norm is not None:
            _round(first, None if concatenated else layer.attention_norm)
        if hasattr(mlp, "router"):  # experts have kernels of their own
            continue
        _round(mlp.down)
        if layer.mlp_norm is not None:
            _round(mlp.up if mlp.gate_up is None else mlp.gate_up, layer.mlp_norm)
    for head in heads:
        _round(head)


def _round(linear: Any, norm: Any = None) -> None:
    """Have one map round its inputs if its weights are int8, and its norm give it rounded ones if nothing else reads
    them."""
    if linear is None or linear.weight.dtype != jnp.int8:
        return
    linear.rounds = True
    if norm is not None:
        norm.rounds = True
