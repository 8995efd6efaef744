"""What config.json says of weights that are quantised already (``quantization_config``).

``READERS`` has one entry for each method that is read: FP8 weights with a scale for each output channel, as jspec stores
them itself, or with a single scale for each weight. A family of models may read another method by itself
(``Family.reads_quantization``). Everything else is refused by its name."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.folder import Folder
from jspec.checkpoints.refusal import Refusal

KEYS = ("quantization_config", "compression_config")  # the second is what early llm-compressor wrote
NVIDIA = "hf_quant_config.json"  # stands beside config.json in checkpoints of NVIDIA Model Optimizer
INSTEAD = (
    "of quantised checkpoints jspec reads FP8 with a scale for each output channel or each weight (compressed-tensors "
    "float-quantized, fp8), and gpt-oss in MXFP4; else use the original bfloat16 checkpoint, with jspec-convert --quantize "
    "int8 or fp8"
)
# The names of modules are matched with regular expressions that a checkpoint brings. Only simple ones are taken, because
# others can keep a matcher busy forever: its work grows with the power of how many repetitions and choices there are.
MAX_PATTERNS, MAX_PATTERN_LENGTH, MAX_CHOICES = 20, 100, 3
_ATOM = r"(?:\w|-|\.|\\[.dw]|\[\^?[\w.-]+\]|\((?:\?:)?(?:[\w.|-]|\\\.)*\)(?![*+?]))"
_SIMPLE = re.compile(rf"\^?(?:{_ATOM}[*+?]?)*\$?", re.ASCII)
_CHOICE = re.compile(r"\(|(?<!\()[*+?]")


@dataclasses.dataclass(frozen=True)
class Modules:
    """Which modules of a network a list in config.json means.

    Attributes:
      names: their names, ``lm_head``, or classes, of which only ``Linear`` is known.
      patterns: regular expressions that the beginnings of their names match.
      key: the key of config.json, for messages.
    """

    names: frozenset[str]
    patterns: tuple[re.Pattern, ...]
    key: str

    def include(self, names: Iterable[str]) -> bool:
        """Whether a linear map, to which a checkpoint may give any of these names, is among them."""
        if "Linear" in self.names:
            return True
        return any(name in self.names or any(one.match(name) for one in self.patterns) for name in names)


@dataclasses.dataclass(frozen=True)
class StoredQuantization:
    """How the weights in the files are quantised.

    Attributes:
      quantization: the value of ``ModelConfig.quantization`` that they can be read as.
      scales: whether there is a scale for each output ``channel``, or one for a whole ``tensor``.
      targets: which modules are quantised.
      ignored: which of these are not, after all.
      where: the file that says so, for messages.
    """

    quantization: Literal["fp8"]
    scales: Literal["channel", "tensor"]
    targets: Modules
    ignored: Modules
    where: str

    def includes(self, names: Iterable[str]) -> bool:
        """Whether a linear map is quantised, to which the checkpoint may give any of these names."""
        names = tuple(names)
        return self.targets.include(names) and not self.ignored.include(names)


def read_quantization(fields: Fields, elsewhere: Collection[str] = ()) -> StoredQuantization | None:
    """How the linear maps of a checkpoint are quantised; None if they are not.

    Args:
      fields: its config.json.
      elsewhere: methods that are read elsewhere, for which None is returned too.

    Raises:
      Refusal: in a way that jspec does not read.
    """
    own = next((found for found in map(fields.nested, KEYS) if found is not None), None)
    if own is None:
        return None
    method = own.text("quant_method", _unnamed_method(own))
    if method in elsewhere:
        return None
    if method not in READERS:
        algorithm = own.raw.get("quant_algo")
        more = f" ({algorithm})" if isinstance(algorithm, str) else ""
        raise Refusal(f"{own.where}: {own.prefix}quant_method={method!r}{more} is not read; {INSTEAD}")
    return READERS[method](own)


def refuse_model_optimizer(folder: Folder):
    """Raise a ``Refusal`` if a file beside config.json says that NVIDIA Model Optimizer has quantised the weights."""
    if not folder.has(NVIDIA):
        return
    fields = Fields(folder.json(NVIDIA), f"{folder.given}/{NVIDIA}").nested("quantization")
    algorithm = None if fields is None else fields.text("quant_algo", None)
    if fields is not None and algorithm is not None:
        raise Refusal(
            f"{fields.where}: {fields.prefix}quant_algo={algorithm!r}, of NVIDIA Model Optimizer, is not read; {INSTEAD}"
        )


def refuse_quantized_head(fields: Fields):
    """Raise a ``Refusal`` if the config.json ``fields`` of a draft head says that its weights are quantised."""
    for own in map(fields.nested, KEYS):
        if own is not None:
            method = own.raw.get("quant_method")
            raise Refusal(
                f"{own.where}: {own.prefix}quant_method={method!r} says that the weights of this draft head are quantised; "
                "those of targets and draft models may be, for a draft head use its bfloat16 checkpoint"
            )


def _unnamed_method(fields: Fields) -> str:
    """The method of a ``quantization_config`` that does not name it: transformers once wrote that for bitsandbytes."""
    legacy = fields.raw.get("load_in_8bit") or fields.raw.get("load_in_4bit")
    return "bitsandbytes" if legacy else "unnamed"


def _compressed_tensors(fields: Fields) -> StoredQuantization:
    """The library compressed-tensors, which llm-compressor writes with."""
    _require(fields, "format", "float-quantized")
    for name in ("sparsity_config", "transform_config"):
        nested = fields.nested(name)
        if nested is not None and nested.raw.get("format") != "dense":
            raise fields.refuse(name, f"none, because neither sparse nor rotated weights are read; {INSTEAD}")
    groups = fields.nested("config_groups")
    names = list(groups.raw) if groups is not None else []
    if groups is None or len(names) != 1:
        raise fields.refuse("config_groups", f"one group, of all linear maps; {INSTEAD}")
    group = groups.nested(names[0])
    weights = None if group is None else group.nested("weights")
    if group is None or weights is None:
        raise groups.refuse(names[0], "an object with weights, because no others are quantised here")
    _require(group, "format", "float-quantized", absent="float-quantized")
    for name, only, absent in (
        ("num_bits", 8, 8),
        ("type", "float", "int"),
        ("symmetric", True, True),
        ("dynamic", False, False),
    ):
        _require(weights, name, only, absent=absent)
    _require(weights, "strategy", "channel", "tensor", absent="tensor")
    scales: Any = weights.text("strategy", "tensor")
    return StoredQuantization(
        "fp8", scales, _modules(group, "targets", ["Linear"]), _modules(fields, "ignore"), fields.where
    )


def _fp8(fields: Fields) -> StoredQuantization:
    """The method ``fp8`` of vLLM: a scale for each weight. Under the same name others store a scale for each block."""
    if fields.raw.get("weight_block_size") is not None:
        expected = f"none, because weights with a scale for each block (weight_scale_inv) are not read; {INSTEAD}"
        raise fields.refuse("weight_block_size", expected)
    _require(fields, "fmt", "e4m3", absent="e4m3")
    key = "modules_to_not_convert" if "modules_to_not_convert" in fields.raw else "ignored_layers"
    every = Modules(frozenset(("Linear",)), (), "")
    return StoredQuantization("fp8", "tensor", every, _modules(fields, key), fields.where)


# quant_method of config.json -> the function that reads the rest of ``quantization_config``.
READERS: dict[str, Callable[[Fields], StoredQuantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
}


def _require(fields: Fields, name: str, *known: Any, absent: Any = None):
    """Raise a ``Refusal`` unless the value under ``name``, or without one ``absent``, is one of ``known``."""
    value = absent if fields.raw.get(name) is None else fields.raw[name]
    if not any(type(value) is type(one) and value == one for one in known):
        raise fields.refuse(name, f"{' or '.join(map(repr, known))}; {INSTEAD}")


def _modules(fields: Fields, name: str, absent: Iterable[str] = ()) -> Modules:
    """The list of modules under ``name``: names, and after ``re:`` regular expressions."""
    listed = absent if fields.raw.get(name) is None else fields.raw[name]
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise fields.refuse(name, "a list of module names")
    patterns = [one.removeprefix("re:") for one in listed if one.startswith("re:")]
    if len(patterns) > MAX_PATTERNS:
        raise fields.refuse(name, f"at most {MAX_PATTERNS} patterns; list the names of modules")
    return Modules(
        frozenset(one for one in listed if not one.startswith("re:")),
        tuple(_compiled(fields, name, pattern) for pattern in patterns),
        fields.prefix + name,
    )


def _compiled(fields: Fields, name: str, pattern: str) -> re.Pattern:
    simple = len(pattern) <= MAX_PATTERN_LENGTH and _SIMPLE.fullmatch(pattern)
    try:
        if simple and len(_CHOICE.findall(pattern)) <= MAX_CHOICES:
            return re.compile(pattern)
    except re.error:
        pass
    raise Refusal(
        f"{fields.where}: {fields.prefix}{name} has the pattern {pattern[:80]!r}: expected names of modules, or patterns of "
        f"at most {MAX_PATTERN_LENGTH} letters, ., [..] and up to {MAX_CHOICES} of *, +, ? and (a|b); list the names instead"
    )
