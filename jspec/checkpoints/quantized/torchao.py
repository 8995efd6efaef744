"""Weights in eight bits that torchao quantises, in safetensors as transformers 5 writes them.

Of a map there are ``<map>._weight_qdata``, int8 or float8_e4m3fn ``[out, in]``, ``._weight_scale``, float32 ``[out, 1]`` or
``[1, 1]``, and of int8 ``._weight_zero_point``, which is 0. ``quant_type`` in config.json says which class of torchao made
them, with its arguments. What those that round activations, too, do with these is not done."""

import dataclasses

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.fp8_numbers import FP8Numbers
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import BlockFormat, WeightTensors, read_plain
from jspec.checkpoints.quantized.fp8 import ScaledWeight
from jspec.quantization.formats import INSTEAD, KINDS, Format

METHOD = "torchao"
# Classes of torchao -> what their weights are kept as.
_FORMS = {
    **dict.fromkeys(("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"), KINDS["int8"]),
    **dict.fromkeys(("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"), KINDS["fp8"]),
}
# Their arguments that change no weight: how activations are rounded, and which kernels multiply.
_OF_ACTIVATIONS = (
    *("act_mapping_type", "activation_dtype", "activation_value_lb", "activation_value_ub", "weight_only_decode"),
    *("alg_id", "kernel_preference", "mm_config", "reduce_range", "set_inductor_config"),
)
_NUMBERS, _ZEROS, _SCALES = ends = "._weight_qdata", "._weight_zero_point", "._weight_scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchAO(BlockFormat):
    """FP8 or int8 of torchao.

    Attributes:
      form: as which the weights are kept.
      of_channels: whether each output channel has a scale; else the whole weight has one.
    """

    bits: int = 8
    ends: tuple[str, ...] = ends
    scale_end: str = _SCALES
    form: Format
    of_channels: bool

    @property
    def summary(self) -> str:
        each = "output channel" if self.of_channels else "weight"
        return f"{'int8' if self.form.name == 'int8' else 'FP8'} with a scale for each {each} (torchao)"

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        numbers = parts.tensors.get(_NUMBERS)
        return None if numbers is None else numbers.shape

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> ScaledWeight:
        numbers = FP8Numbers.of(parts.take(_NUMBERS, shape, (self.form.numbers,)))
        each = (shape[0] if self.of_channels else 1, 1)
        scales = parts.take(_SCALES, each, ("float32", "bfloat16"))
        if self.form.numbers == "int8":
            zeros = parts.take(_ZEROS, each, ("int8",))
            if (wrong := zeros.read()[zeros.read() != 0]).size:
                raise Refusal(
                    f"{parts.where}/{zeros.file}: tensor {zeros.name!r} holds {wrong[0]}: expected 0, because int8 is read "
                    f"without zero points; {INSTEAD}"
                )
        return ScaledWeight(name, numbers.file, numbers.path, shape, "float32", self.form, numbers, scales)


def read_torchao(fields: Fields) -> TorchAO:
    """The ``quantization_config`` of torchao, as transformers writes it.

    Raises:
      Refusal: it says something that is not read.
    """
    quant_type = fields.nested("quant_type") if isinstance(fields.raw.get("quant_type"), dict) else None
    default = None if quant_type is None else quant_type.nested("default")
    if quant_type is None or default is None or len(quant_type.raw) > 1:
        raise fields.refuse("quant_type", f"an object with a class of torchao under 'default' alone; {INSTEAD}")
    require_one_of(default, "_type", *_FORMS)
    require_one_of(default, "_version", 2)
    # Whether the embedding was to be quantised, and a tied one to become two: the tensors say what was.
    for key in ("include_input_output_embeddings", "untie_embedding_weights"):
        fields.flag(key)
    form = _FORMS[default.raw["_type"]]
    plain, of_channels = read_plain(fields, "modules_to_not_convert"), _granularity(default, form) == "PerRow"
    return TorchAO(plain=plain, form=form, of_channels=of_channels)


def _granularity(default: Fields, form: Format) -> str:
    """What has a scale by the arguments of the class of weights, of which all others are checked."""
    arguments = _object(default, "_data")
    known = {"weight_dtype": form.numbers, "packing_format": "PLAIN"}
    for key in arguments.raw:
        if key in known:
            require_one_of(_object(arguments, key), "_data", known[key])
        elif key not in ("granularity", "group_size", *_OF_ACTIVATIONS):
            raise arguments.refuse(key, f"nothing, because this argument is not known; {INSTEAD}")
    if arguments.raw.get("group_size") is not None:
        raise arguments.refuse("group_size", f"null, because groups of inputs have no scales here; {INSTEAD}")
    both = arguments.raw.get("granularity")
    if isinstance(both, list) and both:  # of activations and of weights
        arguments = dataclasses.replace(arguments, raw={**arguments.raw, "granularity": both[-1]})
    one = _object(arguments, "granularity")
    require_one_of(one, "_type", "PerRow", "PerTensor")
    return one.raw["_type"]


def _object(fields: Fields, name: str) -> Fields:
    """The object under ``name``, which may be empty or missing."""
    return fields.nested(name) or Fields({}, fields.where, f"{fields.prefix}{name}.")
