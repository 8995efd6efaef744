"""Block drafters in the format of the ``speculators`` package: the types ``dflash`` and ``dspark``.

Settings are at the top of config.json, and those of the layers in ``transformer_layer_config``. Unlike in other layouts, id
k in ``aux_hidden_state_layer_ids`` means the residual stream after k layers. A layer with a window is causal unless
``sliding_window_non_causal`` says otherwise; without a window a layer never is."""

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.heads import block
from jspec.checkpoints.heads.eagle3_settings import Settings
from jspec.checkpoints.heads.format import HeadFormat
from jspec.checkpoints.heads.layers import read_layers
from jspec.checkpoints.heads.options import HeadOptions
from jspec.checkpoints.heads.speculators import TYPE, layers_of, trained_drafts
from jspec.checkpoints.layout import Layout
from jspec.checkpoints.tensor import Tensor

KINDS = ("dflash", "dspark")
IDS = "aux_hidden_state_layer_ids"


def read(fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The ``Layout`` of a folder in the speculators format.

    Raises:
      Refusal: config.json and the tensors contradict each other, or a setting is not supported.
    """
    layers = read_layers(layers_of(fields, tensors), tensors, "layers.0.", bias_key="attention_bias")
    slides = fields.flag("sliding_window_non_causal")
    causal = tuple(window is not None and not slides for window in layers.windows)
    aux_layers, first = block.listed_after(fields, IDS, shift=0), _anchor_first(fields)
    return block.build(Settings((fields,)), tensors, options, layers, aux_layers, first, causal)


def _anchor_first(fields: Fields) -> bool:
    """Whether the anchor's slot drafts: ``sample_from_anchor``, or else how many tokens the format says that are drafted."""
    key, size, drafts = "sample_from_anchor", fields.integer("block_size"), trained_drafts(fields)
    if fields.raw.get(key) is not None:
        return fields.flag(key)
    if drafts not in (size, size - 1):
        raise fields.refuse(key, f"true or false, because {drafts} speculative_tokens of a block of {size} do not tell")
    return drafts == size


FORMAT = HeadFormat(
    recognises=lambda fields, _: fields.raw.get(TYPE) in KINDS,
    read=lambda _, fields, tensors, options: read(fields, tensors, options),
    lists_layers=True,
)
