"""Multi-token prediction layers (DeepSeek-V3, 2024): in the target's own checkpoint, or alone.

In the target's checkpoint they stand behind its last layer: ``model.layers.61.*`` of DeepSeek-V3, which has layers 0 to 60.
There each layer repeats the target's embedding and output head, which are not loaded. Families whose names of such layers
have a beginning of their own (``TensorNames.mtp``), as Qwen3.5, have one layer:

| tensor | behind the last layer, in ``model.layers.61.`` | in ``mtp.`` |
|---|---|---|
| the map from embedding and feature, ``[D, 2 D]`` | ``eh_proj`` | ``fc`` |
| the norms of both, ``[D]`` | ``enorm``, ``hnorm`` | ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden`` |
| the norm of the outputs, ``[D]`` | ``shared_head.norm`` | ``norm`` |
| the decoder layer | names of a layer | ``layers.0.`` and names of a layer |

Whoever asks for them (``HeadOptions.mtp``) gets them; otherwise that checkpoint is a language model. A tensor says whether
there are some (``mtp_mark``): config.json may announce layers that the files lack, and some do not announce theirs.

Alone they have the layout of SGLang's ``export_deepseek_nextn``: the class of config.json ends with ``NextN``, and names
of the first layer begin with ``model.layers.0``. Or they have that of the speculators package
(``jspec.checkpoints.layouts.mtp_speculators``)."""

import dataclasses
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.config import decoder_config, model_config, stored_quantization
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.layouts.layers import layer_fields, refuse_draft_vocabulary, require_no_windows
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.layouts.quantized import names_of_weights
from jspec.checkpoints.quantized.dequantized_layout import dequantized, stored_shapes, with_note
from jspec.checkpoints.quantized.format import StoredFormats
from jspec.checkpoints.quantized.scaled import FP8Blocks
from jspec.checkpoints.quantized.stored_weights import with_shared_apart, with_stored_weights
from jspec.checkpoints.tensors.layout import PREFIX, Layout, mtp_mark
from jspec.checkpoints.tensors.names import renamed, tensor_table
from jspec.checkpoints.tensors.parts import rearrange, rearranged_tensors, wholes_of_parts
from jspec.checkpoints.tensors.split_experts import split_experts
from jspec.config import ModelConfig
from jspec.config.heads import MTPConfig, mtp_layers
from jspec.config.tensor_names import names_of

ALONE = "NextN"
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's weights
# How names in a layer behind the last one begin -> how they begin in families that have ``TensorNames.mtp``.
_OWN_NAMES = {
    "eh_proj.": "fc.",
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "shared_head.norm.": "norm.",
    "": "layers.0.",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where multi-token prediction layers stand in a checkpoint.

    Attributes:
      start: what stands before ``layers.`` in the names of their decoder layers.
      layers: the numbers that these have there.
      renames: how names begin in ``MTPConfig.parameters`` -> how they begin there.
      starts: how the names of all of their tensors begin.
      copies: names of tensors that repeat the target's embedding and output head.
    """

    start: str
    layers: range
    renames: dict[str, str]
    starts: tuple[str, ...]
    copies: frozenset[str] = frozenset()


def place_of(target: ModelConfig, alone: bool = False) -> Place:
    """Where the multi-token prediction layers of ``target`` stand: beside it, or ``alone``, where it has no other layers."""
    own = names_of(target.architecture).mtp
    if own is not None:
        renames = {f"layers.0.{old}": own + new for old, new in _OWN_NAMES.items()}
        return Place(own, range(1), renames, (own,))
    first, count = (0, target.num_layers) if alone else (target.num_layers, target.mtp_layers)
    renames = {f"layers.{i}.": f"{PREFIX}layers.{first + i}." for i in range(count)}
    copies = frozenset(start + name for start in renames.values() for name in COPIES)
    return Place(PREFIX, range(first, first + count), renames, tuple(renames.values()), copies)


def read(folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The ``Layout`` of the multi-token prediction layers in a folder.

    Raises:
      Refusal: it holds none.
    """
    alone = is_alone(fields)
    if alone:
        _require_names_of_layers(fields)
    target = decoder_config(folder, _of_target(fields) if alone else fields)
    place, mark = place_of(target, alone), mtp_mark(target.architecture, 0 if alone else target.num_layers)
    if mark not in names_of_weights(tensors):
        raise Refusal(
            f"{folder.given}: holds no multi-token prediction layers (tensor {mark!r}), which draft='mtp' asks for; give "
            "another draft"
        )
    return layout_of(target, place, tensors, options, stored_quantization(fields), folder.given)


def layout_of(
    target: ModelConfig,
    place: Place,
    tensors: dict[str, Tensor],
    options: HeadOptions,
    stored: StoredFormats | None,
    where: str,
) -> Layout:
    """The ``Layout`` of the multi-token prediction layers of ``target`` that stand at ``place`` in the folder ``where``; the
    linear maps in its files are quantised as ``stored`` says, or not if that is None."""
    config = options.of_mtp(MTPConfig(mtp_layers(target, len(place.layers))))
    layers, at = place.layers, place.start
    block = stored.block if isinstance(stored, FP8Blocks) else None
    split = split_experts(config.layers, tensors, layers, at, block)
    shapes = stored_shapes(renamed(tensor_table(config), place.renames), rearranged_tensors(config.layers, layers, at))
    replaced = dequantized(split, shapes, stored, where)
    config = dataclasses.replace(config, layers=with_shared_apart(config.layers, replaced.tensors, layers, at))
    layout = Layout(
        config,
        "multi-token prediction layers",
        renamed(tensor_table(config), place.renames),
        rearrange(config.layers, replaced.tensors, layers, at),
        left_out=frozenset(name for name in tensors if name in place.copies or not name.startswith(place.starts)),
        wholes=wholes_of_parts(config.layers, layers, at),
    )
    layout = with_note(layout, replaced)
    return with_stored_weights(layout) if stored is not None and replaced.note else layout


def is_alone(fields: Fields) -> bool:
    """Whether config.json is that of multi-token prediction layers without their target."""
    names = fields.raw.get("architectures")
    return isinstance(names, list) and len(names) == 1 and str(names[0]).endswith(ALONE)


def _require_names_of_layers(fields: Fields):
    """Raise a ``Refusal`` if config.json is that of layers alone whose names have a beginning of their own."""
    if names_of(_class_of_target(fields)).mtp is not None:
        raise fields.refuse(
            "architectures",
            "that of the target: multi-token prediction layers of this class are read from its checkpoint, with draft='mtp'",
        )


def _class_of_target(fields: Fields) -> str:
    [name] = fields.raw["architectures"]
    return str(name).removesuffix(ALONE)


def _of_target(fields: Fields) -> Fields:
    """The config.json ``fields`` of layers alone, as one of a language model that has only these."""
    own = {"architectures": [_class_of_target(fields)], "num_nextn_predict_layers": 0}
    every_layer_has_experts = {"mlp_layer_types": None, "first_k_dense_replace": 0}
    return dataclasses.replace(fields, raw={**fields.raw, **own, **every_layer_has_experts})


def hf_config(config: MTPConfig) -> dict[str, Any]:
    """The config.json of layers alone, which are Llama's.

    Raises:
      ValueError: it cannot state ``config``.
    """
    require_no_windows(config.layers)
    refuse_draft_vocabulary(config)
    plain = config.norm_output and not config.mask_first
    require(plain, "norm_output", config.norm_output, "True, and mask_first=False: no layout states anything else")
    written = {**layer_fields(config.layers), "architectures": [f"{config.layers.architecture}{ALONE}"]}
    which = "that of layers of which sizes and a rotary embedding say everything, as of Llama's"
    expected = f"{which}; the layout of layers alone states nothing else"
    require(_states(written, config.layers), "architecture", config.layers.architecture, expected)
    return written


def _states(written: dict[str, Any], layers: ModelConfig) -> bool:
    """Whether the config.json ``written`` of layers alone is read as ``layers``."""
    try:
        read = model_config(_of_target(Fields(written, "config.json")), layers.architecture)
    except ValueError:
        return False
    return _without_tokens(mtp_layers(read, read.num_layers)) == _without_tokens(layers)


def _without_tokens(layers: ModelConfig) -> ModelConfig:
    """``layers`` without the ids that begin and end a text, which the target decides."""
    return dataclasses.replace(layers, bos_token_id=None, eos_token_ids=())


FORMAT = CheckpointFormat(
    recognises=lambda fields, _: is_alone(fields),
    read=read,
    write_config=lambda config, *_: hf_config(config),
    write_tensors=lambda tensors: {PREFIX + name: array for name, array in tensors.items()},
)
