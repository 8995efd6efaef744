"""Weights that AutoRound (Cheng et al., 2023) exports in formats of its own: the tensors are those of GPTQ or AWQ.

``packing_format`` says which. What it exports as GPTQ, AWQ or for llm-compressor says so under ``quant_method``."""

import dataclasses
import re

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.quantized.awq import AWQ
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import StoredFormats, read_grouping, read_plain
from jspec.checkpoints.quantized.gptq import GPTQ
from jspec.checkpoints.quantized.mixed import PATTERN, read_mixed

METHODS = ("auto-round", "auto_round", "intel/auto-round")
_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
# packing_format -> whether one was subtracted from the zeros before they were stored.
_LESS_ONE = {_GPTQ: True, "auto_round:gptq": True, "auto_round:gptqmodel": False, "auto_round": False}
_LETTERS_OF_PATTERNS = re.compile(r"[*+?^$()\[\]{}|\\]")  # a dot alone makes none


def read_auto_round(fields: Fields) -> StoredFormats:
    """The ``quantization_config`` of AutoRound.

    Entries of ``extra_config`` have settings of their own for some modules. Of those in 16 bits, the tensors in the files
    say that they are not quantised.

    Raises:
      Refusal: it says something that is not read.
    """

    def read(own: Fields) -> GPTQ | AWQ | None:
        if own.integer("bits", 1) >= 16:
            return None
        return _read_alike(dataclasses.replace(own, raw={**fields.raw, **own.raw}))

    return read_mixed(fields, "extra_config", read, _as_pattern, _read_alike(fields))


def _as_pattern(key: str) -> str:
    """A key of ``extra_config`` as an entry of ``mixed``: one with letters of patterns may match any part of a name."""
    if not _LETTERS_OF_PATTERNS.search(key):
        return key
    return PATTERN + (key if key.startswith(("^", ".*")) else f".*{key}")


def _read_alike(fields: Fields) -> GPTQ | AWQ:
    """What is said of modules with these settings."""
    require_one_of(fields, "packing_format", *_LESS_ONE, _AWQ, absent=_GPTQ)
    packing = fields.text("packing_format", _GPTQ)
    require_one_of(fields, "bits", *((4,) if packing == _AWQ else (4, 8)))
    require_one_of(fields, "data_type", "int", absent="int")
    require_one_of(fields, "act_bits", 16, absent=16)
    symmetric = fields.flag("sym", True)
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
