"""A layer for multi-token prediction in the format of the ``speculators`` package: the type ``mtp``.

Its tensors are those of a layer in the target's own checkpoint, or of one that was trained for a Qwen3, under other names:

| tensor | its name behind ``mtp_layers.0.`` |
|---|---|
| the map from embedding and feature, ``[D, 2 D]`` | ``input_proj`` |
| the norms of both, ``[D]`` | ``token_layernorm``, ``hidden_layernorm`` |
| the norm of the outputs, ``[D]`` | ``final_layernorm`` |
| the decoder layer | names of a layer; the maps of all experts are in one tensor |

Embedding and output head are the target's. ``transformer_layer_config`` is the target's config, with the target's number of
layers. The layer reads its own normed output at the next draft position, as ``MTPDraftModel.forward`` does (0.9.0)."""

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.config import decoder_config
from jspec.checkpoints.layouts import speculators
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.layouts.mtp import Place, layout_of
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.tensors.layout import Layout

FAMILIES = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # the layers that the package has (0.9.0)
START = "mtp_layers.0."
PLACE = Place(
    start="mtp_",
    layers=range(1),
    renames={
        "layers.0.eh_proj.": f"{START}input_proj.",
        "layers.0.enorm.": f"{START}token_layernorm.",
        "layers.0.hnorm.": f"{START}hidden_layernorm.",
        "layers.0.shared_head.norm.": f"{START}final_layernorm.",
        "layers.0.": START,
    },
    starts=("",),  # every tensor that is no copy
    copies=frozenset(("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")),
)


def read(folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The ``Layout`` of a folder in the speculators format.

    Raises:
      Refusal: there is more than one layer, the layer is of a kind that the package does not have, an option contradicts
        what the format says, or its config is not that of a language model.
    """
    speculators.refuse_norm_before_head(fields, options)
    fields.only("num_nextn_predict_layers", 1, "as the speculators format has one layer, which drafts all tokens")
    layers = speculators.nested_layers(fields)
    if layers.text("model_type") not in FAMILIES:
        raise layers.refuse("model_type", f"one of {', '.join(FAMILIES)}")
    return layout_of(decoder_config(folder, layers), PLACE, tensors, options, None, folder.given)


FORMAT = CheckpointFormat(
    recognises=lambda fields, _: fields.raw.get(speculators.TYPE) == speculators.MTP,
    read=read,
    classes=("MTPDraftModel",),
    name="speculators",
)
