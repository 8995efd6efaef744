"""W8A8 products: where weights have eight bits, the inputs are quantised to eight bits, too.

Tensor cores then multiply numbers of eight bits, and no weight has to be converted on its way to them: that conversion,
not the memory, bounds a product of 16 tokens and more with weights of eight bits. Each token has one scale for all of its
numbers, so a few large numbers take away the precision of the others.

A drafter in int8 always does so, because the text has the target's distribution whatever it proposes. The residual stream
of language models has such large numbers. Therefore a drafter quantises the outputs of norms, attention and activations,
and not the residual stream and the target's features, which the first maps of draft heads read. (The output head of an
EAGLE head reads an estimate of the target's normed hidden state.)

A target is another model with quantised inputs than without, so only its user has it do so. It then quantises what vLLM
does for W8A8 checkpoints, the inputs of every map of its layers with such weights, in every pass and for any number of
tokens. Two kinds of maps are left out: experts, whose kernels read no quantised inputs, and the maps from latents to keys
and values, which rounds multiply with queries and sums instead of latents."""

from typing import Any

from flax import nnx

from jspec.models.flatten import copied
from jspec.models.layers import Linear
from jspec.quantization.formats import format_of


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
        _quantize_inputs_of_layer(layer, "int8", concatenated=concatenated)
    if head:
        _quantize_inputs_of(drafter.head, "int8")
    return drafter


def with_quantized_activations(target: Any, kind: str) -> Any:
    """A copy of a target that quantises the inputs of all maps of its layers that are stored as ``kind``, with the same
    arrays.

    A token has one scale over all shards, so that the model does not depend on their number.

    Args:
      target: a ``jspec.models.Decoder``, or one shard of it.
      kind: ``int8`` or ``fp8``.
    """
    target = copied(target)
    for layer in target.layers:
        _quantize_inputs_of_layer(layer, kind, residual_stream=True)
    for _, part in nnx.iter_graph(target):
        if isinstance(part, Linear) and part.quantize_inputs is not None:
            part.scale_axis = part.reduce_axis
    return target


def _quantize_inputs_of_layer(layer: Any, kind: str, *, concatenated: bool = False, residual_stream: bool = False):
    """Have the maps of a layer quantise their inputs, the residual stream itself only if ``residual_stream``."""
    mlp = layer.mlp
    if getattr(layer, "delta_net", None) is None:
        _quantize_inputs_of_attention(layer, kind, concatenated, residual_stream)
    else:  # the map to betas and decays, which has floats, reads the norm's outputs as well
        _quantize_inputs_of(layer.delta_net.qkvz, kind)
        _quantize_inputs_of(layer.delta_net.out, kind)
    if hasattr(mlp, "router"):  # experts have kernels of their own
        return
    _quantize_inputs_of(mlp.down, kind)
    if layer.mlp_norm is not None or residual_stream:
        convolved = hasattr(layer, "mlp_conv")  # which reads the norm's outputs before the MLP does
        first = mlp.up if mlp.gate_up is None else mlp.gate_up
        _quantize_inputs_of(first, kind, None if convolved else layer.mlp_norm)


def _quantize_inputs_of_attention(layer: Any, kind: str, concatenated: bool, residual_stream: bool):
    attention = layer.attention
    _quantize_inputs_of(getattr(attention, "queries", None), kind)
    _quantize_inputs_of(attention.out, kind)
    grouped = hasattr(attention, "qkv")  # and not latent
    first, values = (attention.qkv, attention.values) if grouped else (attention.compress, None)
    _quantize_inputs_of(values, kind)
    if not hasattr(layer, "attention_norm"):  # its own norms come before, one of them for each part of the inputs
        _quantize_inputs_of(first, kind)
    elif layer.attention_norm is not None or residual_stream:
        _quantize_inputs_of(first, kind, None if concatenated or values is not None else layer.attention_norm)


def _quantize_inputs_of(linear: Any, kind: str, norm: Any = None) -> None:
    """Have one map quantise its inputs if its weights are stored as ``kind``, and its norm quantise its outputs if no other
    map reads them."""
    if linear is None or linear.form != format_of(kind):
        return
    linear.quantize_inputs = kind
    if norm is not None:
        norm.quantize_outputs = kind
