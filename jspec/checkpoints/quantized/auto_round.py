"""Weights that AutoRound (Cheng et al., 2023) exports in formats of its own: the tensors are those of GPTQ or AWQ.

``packing_format`` says which. What it exports as GPTQ, AWQ or for llm-compressor says so under ``quant_method``."""

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.quantized.awq import AWQ
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import read_grouping, read_plain
from jspec.checkpoints.quantized.gptq import GPTQ
from jspec.quantization.formats import INSTEAD

METHODS = ("auto-round", "auto_round", "intel/auto-round")
_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
# packing_format -> whether one was subtracted from the zeros before they were stored.
_LESS_ONE = {_GPTQ: True, "auto_round:gptq": True, "auto_round:gptqmodel": False, "auto_round": False}
_SETTINGS = ("bits", "group_size", "sym", "data_type")


def read_auto_round(fields: Fields) -> GPTQ | AWQ:
    """The ``quantization_config`` of AutoRound.

    Raises:
      Refusal: it says something that is not read, or some modules are quantised otherwise than the others.
    """
    require_one_of(fields, "packing_format", *_LESS_ONE, _AWQ, absent=_GPTQ)
    packing = fields.text("packing_format", _GPTQ)
    require_one_of(fields, "bits", *((4,) if packing == _AWQ else (4, 8)))
    require_one_of(fields, "data_type", "int", absent="int")
    require_one_of(fields, "act_bits", 16, absent=16)
    symmetric = fields.flag("sym", True)
    _require_alike(fields)
    plain, grouping = read_plain(fields, "modules_to_not_convert"), read_grouping(fields)
    if packing == _AWQ:
        return AWQ(plain=plain, bits=4, grouping=grouping)
    return GPTQ(
        plain=plain,
        bits=fields.raw["bits"],
        grouping=grouping,
        ordered=False,
        less_one=_LESS_ONE[packing],
        symmetric=symmetric,
    )


def _require_alike(fields: Fields):
    """Raise a ``Refusal`` if ``extra_config`` has other settings for some modules that are quantised. Of modules that it
    leaves in 16 bits or more, the tensors say that as well."""
    extra = fields.nested("extra_config")
    for module in () if extra is None else list(extra.raw):
        own = extra.nested(module) if extra is not None else None
        if own is None or own.integer("bits", fields.raw["bits"]) >= 16:
            continue
        for name in _SETTINGS:
            if own.raw.get(name) not in (None, fields.raw.get(name)):
                raise own.refuse(name, f"{fields.raw.get(name)!r}, because all modules are quantised alike; {INSTEAD}")
