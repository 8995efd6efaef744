"""Reads how stored weights are quantised (``quantization_config`` of config.json).

``READERS`` has one entry for each method that is read. Weights in FP8 or int8 with a scale for each output channel, as jspec
stores them itself, or with a single scale for each weight are ``Scaled``. A family of models may read another method by
itself (``Family.reads_quantization``). Everything else is refused by its name."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.quantized.auto_round import METHODS as AUTO_ROUND
from jspec.checkpoints.quantized.auto_round import read_auto_round
from jspec.checkpoints.quantized.awq import read_awq
from jspec.checkpoints.quantized.bitsandbytes import METHOD as BITSANDBYTES
from jspec.checkpoints.quantized.bitsandbytes import read_bitsandbytes
from jspec.checkpoints.quantized.config_fields import KEYS, quantization_of, read_modules, require_one_of
from jspec.checkpoints.quantized.e2m1 import read_compressed_floats
from jspec.checkpoints.quantized.format import BlockFormat, StoredFormats, read_block, read_plain
from jspec.checkpoints.quantized.gptq import read_gptq
from jspec.checkpoints.quantized.known_keys import KEYS as KNOWN_KEYS
from jspec.checkpoints.quantized.known_keys import require_known
from jspec.checkpoints.quantized.mixed import mixed
from jspec.checkpoints.quantized.model_optimizer import METHOD, read_model_optimizer
from jspec.checkpoints.quantized.packed import read_codes_in_bytes, read_pack_quantized
from jspec.checkpoints.quantized.scaled import FP8Blocks, Scaled, read_fp8_blocks
from jspec.checkpoints.quantized.torchao import METHOD as TORCHAO
from jspec.checkpoints.quantized.torchao import read_torchao
from jspec.quantization.formats import INSTEAD

# Formats of compressed-tensors whose groups of inputs have scales -> the function that reads the rest of a
# ``quantization_config``, given the whole and what it says of the weights of all linear maps. It raises a ``Refusal`` if
# something there is not read.
IN_CODES: dict[str, Callable[[Fields, Fields], BlockFormat]] = {
    "pack-quantized": read_pack_quantized,
    "nvfp4-pack-quantized": functools.partial(read_compressed_floats, "nvfp4"),
    "mxfp4-pack-quantized": functools.partial(read_compressed_floats, "mxfp4"),
    "mxfp8-quantized": functools.partial(read_compressed_floats, "mxfp8"),
}
# Formats of compressed-tensors with eight bits -> the types of numbers that they may have.
EIGHT_BITS = {"float-quantized": ("float",), "int-quantized": ("int",), "naive-quantized": ("float", "int")}
FORMATS = (*EIGHT_BITS, *IN_CODES)  # of compressed-tensors
LINEAR = "Linear"  # the only class of modules that is quantised
_MIXED = "mixed-precision"  # what stands in place of a format where each group names its own


def read_quantization(fields: Fields, elsewhere: Collection[str] = ()) -> StoredFormats | None:
    """How the linear maps of a checkpoint are quantised; None if they are not.

    Args:
      fields: its config.json.
      elsewhere: methods that are read elsewhere, for which None is returned too.

    Raises:
      Refusal: in a way that jspec does not read. Where the cache alone is quantised, or weights are only rotated, they are
        not quantised.
    """
    found = quantization_of(fields)
    if not found:
        return None
    own = found[0]
    if any(other.raw != own.raw for other in found):
        raise Refusal(f"{fields.where}: {' and '.join(KEYS)} contradict each other; remove the one that is wrong")
    method = own.text("quant_method", _unnamed_method(own))
    if method not in READERS and method not in elsewhere:
        algorithm = own.raw.get("quant_algo")
        more = f" ({algorithm})" if isinstance(algorithm, str) else ""
        raise Refusal(f"{own.where}: {own.prefix}quant_method={method!r}{more} is not read; {INSTEAD}")
    read = None if method in elsewhere or _quantizes_no_weights(own) else READERS[method](own)
    require_known(own, KNOWN_KEYS[method])
    return read


def _quantizes_no_weights(fields: Fields) -> bool:
    """Whether a ``quantization_config`` quantises the cache of keys and values alone, as compressed-tensors and NVIDIA Model
    Optimizer write it, or says only that weights are rotated."""
    of_weights = any(fields.raw.get(key) for key in ("config_groups", "quant_algo"))
    of_weights |= fields.raw.get("quant_method") not in ("compressed-tensors", METHOD)
    others = any(fields.raw.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo", "transform_config"))
    return others and not of_weights and fields.raw.get("format") in (None, "dense")


def _unnamed_method(fields: Fields) -> str:
    """The method of a ``quantization_config`` that does not name it: transformers once wrote that for bitsandbytes."""
    legacy = fields.raw.get("load_in_8bit") or fields.raw.get("load_in_4bit")
    return BITSANDBYTES if legacy else "unnamed"


def _compressed_tensors(fields: Fields) -> StoredFormats:
    """The library compressed-tensors, which llm-compressor writes with."""
    groups = fields.nested("config_groups")
    if groups is None:
        require_one_of(fields, "format", *FORMATS)
        raise fields.refuse("config_groups", f"groups of linear maps; {INSTEAD}")
    targets, form = {}, None
    for name in groups.raw:
        form, listed = _read_group(fields, groups, name)
        targets |= dict.fromkeys(listed, form)  # the last group counts that has a target
    if form is not None and len(groups.raw) == 1:
        return form
    # As in the library: names come first, then patterns in the order of their letters, and a class last.
    entries = [(target, targets[target]) for target in sorted(targets) if target != LINEAR]
    return mixed(fields, "config_groups", entries, targets.get(LINEAR))


def _read_group(fields: Fields, groups: Fields, name: str) -> tuple[BlockFormat, Sequence[str]]:
    """The format of the group ``name`` of compressed-tensors, and its targets: names, patterns and classes of modules."""
    group = groups.nested(name)
    whole = fields.raw.get("format")
    of_group = group is not None and (whole == _MIXED or (whole is None and group.raw.get("format") is not None))
    naming = group if group is not None and of_group else fields
    require_one_of(naming, "format", *FORMATS)
    form, weights = naming.raw["format"], None if group is None else group.nested("weights")
    if group is None or weights is None:
        raise groups.refuse(name, "an object with weights, because no others are quantised here")
    require_one_of(group, "format", form, absent=form)
    in_files = ("group",) if form == "pack-quantized" else ()  # other orders are those in which codes were chosen
    require_one_of(weights, "actorder", False, "weight", "static", *in_files, absent=False)
    read_modules(group, "targets")
    read = IN_CODES[form](fields, weights) if form in IN_CODES else _eight_bits(fields, form, group, weights)
    return read, group.raw.get("targets") or [LINEAR]


def _eight_bits(fields: Fields, form: str, group: Fields, weights: Fields) -> BlockFormat:
    """The format ``form`` of compressed-tensors, with eight bits, its only group, and what this says of weights; or that of
    codes of four bits with a byte each."""
    if weights.raw.get("num_bits") == 4 and form == "int-quantized":
        return read_codes_in_bytes(fields, weights)
    for name, only, absent in (("num_bits", 8, 8), ("symmetric", True, True), ("dynamic", False, False)):
        require_one_of(weights, name, only, absent=absent)
    require_one_of(weights, "type", *EIGHT_BITS[form], absent="int")
    is_float = weights.text("type", "int") == "float"
    blocks = ("block",) if is_float else ()
    require_one_of(weights, "strategy", "channel", "tensor", *blocks, absent="tensor")
    scales: Any = weights.text("strategy", "tensor")
    if scales == "block":
        return FP8Blocks(plain=read_plain(fields, "ignore"), block=read_block(weights, "block_structure"))
    targets, ignored = read_modules(group, "targets", [LINEAR]), read_modules(fields, "ignore")
    return Scaled.of("fp8" if is_float else "int8", scales, ignored, fields.where, targets)


def _fp8(fields: Fields) -> BlockFormat:
    """The method ``fp8``: of vLLM, with a scale for each weight, or of DeepSeek, with a scale for each block."""
    if fields.raw.get("weight_block_size") is not None:
        return read_fp8_blocks(fields)
    require_one_of(fields, "fmt", "e4m3", "float8_e4m3fn", absent="e4m3")
    key = "modules_to_not_convert" if "modules_to_not_convert" in fields.raw else "ignored_layers"
    return Scaled.of("fp8", "tensor", read_modules(fields, key), fields.where)


# quant_method of config.json -> the function that reads the rest of ``quantization_config``.
READERS: dict[str, Callable[[Fields], StoredFormats]] = {
    "awq": read_awq,
    BITSANDBYTES: read_bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": read_gptq,
    METHOD: read_model_optimizer,
    TORCHAO: read_torchao,
    **dict.fromkeys(AUTO_ROUND, read_auto_round),
}
