"""What some tools put around a native head, taken off: a prefix of every tensor, or a config around the config.

NeMo Automodel saves EAGLE-3 heads with ``model.`` before the names of their tensors. vLLM's first engine read EAGLE
heads whose config.json is ``{"model_type": "eagle", "model": {the config of the layers}, "eagle_fc_bias": ..,
"truncated_vocab_size": ..}``, and dropped up to two such prefixes. That engine fed zeros into slot 0, which no other
reader does, and neither does jspec."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.heads.layers import by_presence
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor

PREFIX = "model."
WRAPPER = "eagle"  # model_type of vLLM's wrapper

# A native EAGLE or EAGLE-3 head has at least one of these, and no language model has any.
_OF_HEADS = ("fc.weight", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")

# Settings of the wrapper with the one value that is supported, which is also what vLLM takes an absent one for.
_WRAPPER_FIXED = (("skip_prenorm", True), ("skip_output_norm", True), ("add_para_norm", False))

# The wrapper's reader leaves these out as long as the settings above have their values.
_WRAPPER_UNUSED = ("layers.0.input_layernorm.weight", "norm.weight", "token_map")


class Native(NamedTuple):
    """A head as its own layout has it.

    Attributes:
      fields: its config.json.
      tensors: its tensors, by name.
      left_out: tensors that the wrapper's reader does not use.
      notes: what was taken off, a sentence each.
    """

    fields: Fields
    tensors: dict[str, Tensor]
    left_out: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def native(fields: Fields, tensors: dict[str, Tensor]) -> Native:
    """``fields`` and ``tensors`` without what is around a native head; others are returned as they are.

    Raises:
      Refusal: a prefix that no reader of these layouts knows, or a wrapper with a setting that is not supported.
    """
    names = plain_names(fields, tensors)
    plain = {names[name]: tensor for name, tensor in tensors.items()}
    notes = ()
    if len(plain) != len(tensors):
        twice = next(name for name in tensors if name.startswith(PREFIX) and names[name] in tensors)
        raise Refusal(f"{fields.where}: the files hold both {names[twice]!r} and {twice!r}, of which one is meant")
    if plain.keys() != tensors.keys():
        notes = (f"the tensors were read without their prefix {PREFIX!r}",)
    if fields.raw.get("model_type") != WRAPPER:
        _require_no_prefix(fields, plain)
        return Native(fields, plain, notes=notes)
    notes = (*notes, "config.json is vLLM's wrapper of an EAGLE config")
    return Native(_unwrapped(fields, plain), plain, frozenset(_WRAPPER_UNUSED), notes)


def plain_names(fields: Fields, names: Iterable[str]) -> dict[str, str]:
    """Name in the files -> name without the prefix, which is dropped where it stands before a head's tensors."""
    names = list(names)
    prefixed = any(PREFIX + mark in names for mark in _OF_HEADS)
    plain = {name: name for name in names}
    for _ in range(2 if fields.raw.get("model_type") == WRAPPER else int(prefixed)):
        plain = {name: short.removeprefix(PREFIX) for name, short in plain.items()}
    return plain


def _require_no_prefix(fields: Fields, names: Collection[str]):
    if any(name.startswith("model.layers.") for name in names):
        return  # a language model, which may have layers of its own for drafting
    for name in names:
        for mark in _OF_HEADS:
            if name.endswith(f".{mark}"):
                prefix = name.removesuffix(mark)
                raise Refusal(
                    f"{fields.where}: tensor {name!r} looks like {mark!r} of a draft head with the prefix {prefix!r}; "
                    f"expected no prefix, or {PREFIX!r}: rename the tensors"
                )


def _unwrapped(fields: Fields, names: Iterable[str]) -> Fields:
    """The config inside the wrapper; what the wrapper says itself counts more, as in vLLM."""
    inner = fields.nested("model")
    if inner is None:
        raise fields.refuse("model", "an object, the config of the head's layers")
    own = ("model", "architectures", "model_type", "truncated_vocab_size", "eagle_fc_bias")
    merged = {**inner.raw, **{key: value for key, value in fields.raw.items() if key not in own}}
    inside = Fields(merged, fields.where)
    for key, only in _WRAPPER_FIXED:
        if inside.flag(key, only) != only:
            raise inside.refuse(key, f"{str(only).lower()}, the one value that is supported")
    by_presence(fields, "eagle_fc_bias", "fc.bias", names)
    V = inside.integer("vocab_size")
    if fields.integer("truncated_vocab_size", V) != V:
        raise fields.refuse("truncated_vocab_size", f"{V}, the whole vocabulary: a token_map is not supported")
    return inside
