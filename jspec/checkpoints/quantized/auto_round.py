"""Weights that AutoRound (Cheng et al., 2023) exports in formats of its own: the tensors are those of others.

``packing_format`` and ``data_type`` say of which: integers are stored as GPTQ or AWQ has them, MXFP4, MXFP8 and NVFP4 as
compressed-tensors does, and FP8 as that or as DeepSeek-V3 has it in blocks. What AutoRound exports as GPTQ, AWQ or for
llm-compressor says so under ``quant_method``."""

import dataclasses
import re

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.quantized.awq import AWQ
from jspec.checkpoints.quantized.config_fields import read_modules, require_one_of
from jspec.checkpoints.quantized.e2m1 import read_floats
from jspec.checkpoints.quantized.format import BlockFormat, StoredFormats, read_grouping, read_plain
from jspec.checkpoints.quantized.gptq import GPTQ
from jspec.checkpoints.quantized.mixed import PATTERN, read_mixed
from jspec.checkpoints.quantized.scaled import Scaled, read_fp8_blocks

METHODS = ("auto-round", "auto_round", "intel/auto-round")
_GPTQ, _AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
_PLAIN = "modules_to_not_convert"
# packing_format -> whether one was subtracted from the zeros before they were stored.
_LESS_ONE = {_GPTQ: True, "auto_round:gptq": True, "auto_round:gptqmodel": False, "auto_round": False}
# Of data_type: floats with scales for groups -> bits -> what they are called here; FP8, and how it is packed.
_IN_GROUPS = {"mx_fp": {4: "mxfp4", 8: "mxfp8"}, "nv_fp": {4: "nvfp4"}}
_FP8, _FP8_PACKINGS = ("fp", "fp8"), ("auto_round:fp8", "auto_round:fp8_static")
_LETTERS_OF_PATTERNS = re.compile(r"[*+?^$()\[\]{}|\\]")  # a dot alone makes none


def read_auto_round(fields: Fields) -> StoredFormats:
    """The ``quantization_config`` of AutoRound.

    Entries of ``extra_config`` have settings of their own for some modules. Of those in 16 bits, the tensors in the files
    say that they are not quantised.

    Raises:
      Refusal: it says something that is not read.
    """

    def read(own: Fields) -> BlockFormat | None:
        if own.integer("bits", 1) >= 16:
            return None
        return _read_alike(dataclasses.replace(own, raw={**fields.raw, **own.raw}))

    return read_mixed(fields, "extra_config", read, _as_pattern, _read_alike(fields))


def _as_pattern(key: str) -> str:
    """A key of ``extra_config`` as an entry of ``mixed``: one with letters of patterns may match any part of a name."""
    if not _LETTERS_OF_PATTERNS.search(key):
        return key
    return PATTERN + (key if key.startswith(("^", ".*")) else f".*{key}")


def _read_alike(fields: Fields) -> BlockFormat:
    """What is said of modules with these settings."""
    require_one_of(fields, "data_type", "int", *_IN_GROUPS, *_FP8, absent="int")
    if (kind := fields.text("data_type", "int")) != "int":
        return _read_fp8(fields) if kind in _FP8 else _read_groups(fields, _IN_GROUPS[kind])
    require_one_of(fields, "packing_format", *_LESS_ONE, _AWQ, absent=_GPTQ)
    packing = fields.text("packing_format", _GPTQ)
    require_one_of(fields, "bits", *((4,) if packing == _AWQ else (4, 8)))
    require_one_of(fields, "act_bits", 16, absent=16)
    symmetric = fields.flag("sym", True)
    plain, grouping = read_plain(fields, _PLAIN), read_grouping(fields)
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


def _read_groups(fields: Fields, of_bits: dict[int, str]) -> BlockFormat:
    """``_read_alike`` of floats with scales for groups of inputs."""
    require_one_of(fields, "packing_format", "auto_round:llm_compressor")
    require_one_of(fields, "bits", *of_bits)
    return read_floats(of_bits[fields.raw["bits"]], fields, _PLAIN)


def _read_fp8(fields: Fields) -> BlockFormat:
    """``_read_alike`` of FP8 with a scale for each block, output channel (``group_size`` -1) or weight (0)."""
    require_one_of(fields, "packing_format", *_FP8_PACKINGS, absent=_FP8_PACKINGS[0])
    require_one_of(fields, "bits", 8)
    if fields.raw.get("weight_block_size") is not None:
        return read_fp8_blocks(fields)
    require_one_of(fields, "fmt", "e4m3", absent="e4m3")
    require_one_of(fields, "group_size", -1, 0)
    scales = "tensor" if fields.raw["group_size"] == 0 else "channel"
    return Scaled.of("fp8", scales, read_modules(fields, _PLAIN), fields.where)
