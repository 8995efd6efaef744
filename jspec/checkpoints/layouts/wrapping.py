"""Removes the prefixes and outer config that two tools add to EAGLE and EAGLE-3 heads.

NeMo Automodel saves EAGLE-3 heads with the prefix ``model.`` before the name of each tensor: ``model.fc.weight`` is
read as ``fc.weight``.

vLLM's first engine read EAGLE heads whose config.json is ``{"model_type": "eagle", "model": {the config of the layers},
"eagle_fc_bias": .., "truncated_vocab_size": ..}``, and it removed up to two prefixes ``model.``. That engine also
replaced the output of ``fc`` at position 0 by zeros. No other reader of these heads does that, and neither does
jspec."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import NamedTuple

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.layers import has_tensor

PREFIX = "model."
WRAPPER = "eagle"  # the model_type in vLLM's wrapping config.json

# Every EAGLE or EAGLE-3 head has at least one of these tensors, and no language model has any.
_MARKER_TENSORS = ("fc.weight", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")

# How tensors of language models begin, of multimodal ones too, and none of a draft head.
_LANGUAGE_MODEL = ("model.layers.", "model.language_model.", "language_model.")

# Settings in vLLM's wrapping config, each with the only supported value. The same value is vLLM's default.
_WRAPPER_FIXED = (("skip_prenorm", True), ("skip_output_norm", True), ("add_para_norm", False))

# Tensors that vLLM does not use while the settings above have these values.
_WRAPPER_UNUSED = ("layers.0.input_layernorm.weight", "norm.weight", "token_map")


class Unwrapped(NamedTuple):
    """A checkpoint without prefixes and outer config.

    Attributes:
      fields: its config.json.
      tensors: name without prefix -> tensor.
      left_out: names of tensors that may be in the files and are not used.
      notes: one sentence for the user on each thing that was removed.
    """

    fields: Fields
    tensors: dict[str, Tensor]
    left_out: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def unwrap(fields: Fields, tensors: dict[str, Tensor]) -> Unwrapped:
    """A checkpoint without prefix and wrapping config; one that has neither is returned unchanged.

    Args:
      fields: its config.json.
      tensors: name in the files -> tensor.

    Raises:
      Refusal: the tensors of a draft head have a prefix that no reader of these layouts knows, or vLLM's wrapping config
        has a setting that is not supported.
    """
    names = names_without_prefix(fields, tensors)
    plain = {names[name]: tensor for name, tensor in tensors.items()}
    notes = ()
    if len(plain) != len(tensors):
        twice = next(name for name in tensors if name.startswith(PREFIX) and names[name] in tensors)
        raise Refusal(f"{fields.where}: the files hold both {names[twice]!r} and {twice!r}, of which one is meant")
    if plain.keys() != tensors.keys():
        notes = (f"the tensors were read without their prefix {PREFIX!r}",)
    if fields.raw.get("model_type") != WRAPPER:
        _require_no_prefix(fields, plain)
        return Unwrapped(fields, plain, notes=notes)
    notes = (*notes, "config.json is vLLM's wrapper of an EAGLE config")
    return Unwrapped(_inner_config(fields, plain), plain, frozenset(_WRAPPER_UNUSED), notes)


def names_without_prefix(fields: Fields, names: Iterable[str]) -> dict[str, str]:
    """Name in the files -> name without the prefix ``model.``, if the files hold a draft head with that prefix.

    The tensors of a language model also begin with ``model.``; their names stay."""
    names = list(names)
    prefixed = any(PREFIX + mark in names for mark in _MARKER_TENSORS)
    plain = {name: name for name in names}
    for _ in range(2 if fields.raw.get("model_type") == WRAPPER else int(prefixed)):
        plain = {name: short.removeprefix(PREFIX) for name, short in plain.items()}
    return plain


def _require_no_prefix(fields: Fields, names: Collection[str]):
    if any(name.startswith(_LANGUAGE_MODEL) for name in names):
        return  # This is a language model, whose own multi-token-prediction layers may be named like a draft head's.
    for name in names:
        for mark in _MARKER_TENSORS:
            if name.endswith(f".{mark}"):
                prefix = name.removesuffix(mark)
                raise Refusal(
                    f"{fields.where}: tensor {name!r} looks like {mark!r} of a draft head with the prefix {prefix!r}; "
                    f"expected no prefix, or {PREFIX!r}: rename the tensors"
                )


def _inner_config(fields: Fields, names: Iterable[str]) -> Fields:
    """The config inside vLLM's wrapping config. A key that both have takes the outer value, as in vLLM."""
    inner = fields.nested("model")
    if inner is None:
        raise fields.refuse("model", "an object, the config of the draft head's layers")
    own = ("model", "architectures", "model_type", "truncated_vocab_size", "eagle_fc_bias")
    merged = {**inner.raw, **{key: value for key, value in fields.raw.items() if key not in own}}
    inside = dataclasses.replace(fields, raw=merged)
    for key, only in _WRAPPER_FIXED:
        inside.only(key, only, "the one value that is supported")
    has_tensor(fields, "eagle_fc_bias", "fc.bias", names)
    V = inside.integer("vocab_size")
    fields.only("truncated_vocab_size", V, "the whole vocabulary: a token_map is not supported")
    return inside
