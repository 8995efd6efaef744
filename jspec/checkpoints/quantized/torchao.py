"""Weights that torchao quantises, in safetensors as transformers 5 writes them: FP8, and integers of up to eight bits.

Of a map there are ``<map>._weight_qdata``, int8 or float8_e4m3fn ``[out, in]``, ``._weight_scale``, float32 ``[out, 1]``,
``[1, 1]`` or ``[out, groups]``, and of integers ``._weight_zero_point``, int8 and as many. ``quant_type`` in config.json
says which class of torchao made them, with its arguments. What those that round activations, too, do with these is not
done."""

import dataclasses

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import BlockFormat, Grouping, WeightTensors, read_grouping, read_plain
from jspec.checkpoints.quantized.packed import CodesInBytes
from jspec.checkpoints.quantized.scaled import ScaledFormat, ScaledWeight
from jspec.quantization.formats import INSTEAD, KINDS

METHOD = "torchao"
_INT8, _FP8, _CODES = ("PerRow", "PerTensor", "PerGroup"), ("PerRow", "PerTensor"), ("PerAxis", "PerGroup")
# Classes of torchao -> what may have a scale.
_CLASSES = {
    **dict.fromkeys(("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"), _INT8),
    **dict.fromkeys(("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"), _FP8),
    **dict.fromkeys(("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"), _CODES),
}
# Their arguments that change no weight, or that tensors tell: how activations are rounded, which kernels multiply, and how
# numbers were rounded.
_OTHERS = (
    *("act_mapping_type", "activation_dtype", "activation_value_lb", "activation_value_ub", "weight_only_decode"),
    *("alg_id", "kernel_preference", "mm_config", "reduce_range", "set_inductor_config", "mapping_type", "scale_dtype"),
    *("weight_mapping_type", "weight_scale_dtype", "intx_choose_qparams_algorithm"),
)
_NUMBERS, _ZEROS, _SCALES = ends = "._weight_qdata", "._weight_zero_point", "._weight_scale"
_PACKING = {"packing_format": "PLAIN", "intx_packing_format": "UNPACKED_TO_INT8"}
_INTEGERS = tuple(f"int{bits}" for bits in range(1, 9))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchAO(ScaledFormat):
    """FP8 or int8 of torchao with a scale for each output channel, or for the whole weight."""

    ends: tuple[str, ...] = ends
    scale_end: str = _SCALES

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> ScaledWeight:
        if self.form.numbers == "int8":
            zeros = parts.take(_ZEROS, (shape[0] if self.block[0] else 1, 1), ("int8",))
            if (wrong := zeros.read()[zeros.read() != 0]).size:
                raise Refusal(
                    f"{parts.where}/{zeros.file}: tensor {zeros.name!r} holds {wrong[0]}: expected 0, because int8 is read "
                    f"without zero points; {INSTEAD}"
                )
        return super().weight(name, shape, parts)


def read_torchao(fields: Fields) -> BlockFormat:
    """The ``quantization_config`` of torchao, as transformers writes it.

    Raises:
      Refusal: it says something that is not read.
    """
    quant_type = fields.nested("quant_type") if isinstance(fields.raw.get("quant_type"), dict) else None
    default = None if quant_type is None else quant_type.nested("default")
    if quant_type is None or default is None or len(quant_type.raw) > 1:
        raise fields.refuse("quant_type", f"an object with a class of torchao under 'default' alone; {INSTEAD}")
    require_one_of(default, "_type", *_CLASSES)
    require_one_of(default, "_version", 2)
    # Whether the embedding was to be quantised, and a tied one to become two: the tensors say what was.
    for key in ("include_input_output_embeddings", "untie_embedding_weights"):
        fields.flag(key)
    plain, kinds = read_plain(fields, "modules_to_not_convert"), _CLASSES[default.raw["_type"]]
    numbers = _INTEGERS if kinds is _CODES else ("float8_e4m3fn",) if kinds is _FP8 else ("int8",)
    one, dtype = _granularity(default, kinds, numbers)
    if (kind := one.raw["_type"]) not in ("PerRow", "PerTensor"):
        grouping = Grouping(-1, "") if kind == "PerAxis" else read_grouping(_object(one, "_data"))
        require_one_of(_object(one, "_data"), "axis", 0, absent=0)
        four = dtype in _INTEGERS[:4]
        return CodesInBytes(
            plain=plain,
            bits=4 if four else 8,
            ends=ends,
            scale_end=_SCALES,
            grouping=grouping,
            zeros_end=_ZEROS,
            words=f"{{bits}} in a byte each with a scale for each {{groups}} ({METHOD})",
        )
    name, each, height = "FP8" if kinds is _FP8 else "int8", "weight", None
    if kind == "PerRow":
        each, height = "output channel", 1
    words = f"{name} with a scale for each {each} ({METHOD})"
    return TorchAO(plain=plain, form=KINDS[name.lower()], block=(height, None), words=words)


def _granularity(default: Fields, kinds: tuple[str, ...], numbers: tuple[str, ...]) -> tuple[Fields, str]:
    """What has a scale by the arguments of the class of weights, one of ``kinds``, and the dtype of numbers, one of
    ``numbers``; all others are checked."""
    arguments = _object(default, "_data")
    for key in arguments.raw:
        if key == "weight_dtype":
            require_one_of(_object(arguments, key), "_data", *numbers)
        elif key in _PACKING:
            require_one_of(_object(arguments, key), "_data", _PACKING[key])
        elif key not in ("granularity", "weight_granularity", "group_size", *_OTHERS):
            raise arguments.refuse(key, f"nothing, because this argument is not known; {INSTEAD}")
    if arguments.raw.get("group_size") is not None:
        raise arguments.refuse("group_size", f"null, because granularity says what has a scale; {INSTEAD}")
    both = arguments.raw.get("granularity")
    if isinstance(both, list) and both:  # of activations and of weights
        arguments = dataclasses.replace(arguments, raw={**arguments.raw, "granularity": both[-1]})
    one = _object(arguments, "weight_granularity" if "weight_granularity" in arguments.raw else "granularity")
    require_one_of(one, "_type", *kinds)
    return one, _object(arguments, "weight_dtype").raw.get("_data", numbers[-1])


def _object(fields: Fields, name: str) -> Fields:
    """The object under ``name``, which may be empty or missing."""
    return fields.nested(name) or Fields({}, fields.where, f"{fields.prefix}{name}.")
