"""What a checkpoint says of a cache in eight bits: that it was made for one, and the scales of keys and values.

config.json says so in ``kv_cache_scheme`` of its ``quantization_config``, as compressed-tensors writes it, or in
``kv_cache_quant_algo``, as NVIDIA Model Optimizer does, there or in ``hf_quant_config.json``. The scales are tensors
beside the maps of a layer's attention, one number for a layer or one for each of its KV heads.

Where latents are cached (``jspec.models.mla``), a layer has one scale for them and for the rotated keys beside them, as in
vLLM: that of keys which Model Optimizer writes for such models. What llm-compressor writes is for the keys and values of
all heads, which transformers caches there: vLLM does not read it for latents, and neither does this."""

import dataclasses
import itertools
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config_fields import quantization_of
from jspec.checkpoints.quantized.format import read_scales
from jspec.checkpoints.quantized.model_optimizer import FILE
from jspec.config import ModelConfig
from jspec.config.tensor_names import names_of

SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")  # the second is Model Optimizer's
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}  # absent keys mean these
_STRATEGIES = ("tensor", "attn_head", None)
_ALGORITHM = "FP8"  # of Model Optimizer
# Where below a layer's attention its scales stand: the maps, with keys' beside values' or all three in one, and names of
# vLLM's own modules, to some of which its loader renames the rest.
_PLACES = ("", "{}_proj.", "qkv_proj.", "qkqkv_proj.", "attn.", "attn.impl.")
_SCALE = re.compile(r"(.*[._])?(k|v|kv)(_cache)?_scale")  # below it, under a known name or another


@dataclasses.dataclass(frozen=True)
class CacheScheme:
    """That a checkpoint says of its cache that it is quantised.

    Attributes:
      where: the file that says so.
      key: ``kv_cache_scheme`` or ``kv_cache_quant_algo``.
      value: what stands there, unchecked.
    """

    where: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.key}={self.value!r}"

    @property
    def is_read(self) -> bool:
        """Whether it is so in the one way that jspec reads: FP8 with scales in the files."""
        if isinstance(self.value, Mapping):
            plain = all(self.value.get(key, expected) in (expected, None) for key, expected in SCHEME.items())
            return plain and self.value.get("strategy") in _STRATEGIES and self.value.get("group_size") is None
        return isinstance(self.value, str) and self.value.upper() == _ALGORITHM

    @property
    def is_of_latents(self) -> bool:
        """Whether it holds for latents in a model that caches some, as that of Model Optimizer does; one that names a
        strategy is of keys and values of heads."""
        return self.is_read and not (isinstance(self.value, Mapping) and self.value.get("strategy"))

    def is_for(self, config: ModelConfig) -> bool:
        """Whether jspec reads it, and it holds for what this model caches."""
        return self.is_read if config.latent is None else self.is_of_latents


def cache_scheme(folder: Folder, fields: Fields) -> CacheScheme | None:
    """What a checkpoint says of a quantised cache; None if it says nothing of it.

    Args:
      folder: the checkpoint.
      fields: its config.json.
    """
    said = quantization_of(fields)
    if folder.has(FILE):
        beside = Fields(folder.json(FILE), f"{folder.given}/{FILE}").nested("quantization")
        said += [] if beside is None else [beside]
    for described in said:
        for key in SCHEMES:
            if value := described.raw.get(key):
                return CacheScheme(described.where, key, value)
    return None


def cache_scales(tensors: Mapping[str, Tensor], config: ModelConfig, where: str) -> list[tuple[np.ndarray, ...]]:
    """The scales of keys and values of each layer, float32 ``[G]`` each, or that of its latents ``[1]``; ones, with a
    warning, where the files have none. A layer without keys and values of its own has ones, too.

    Args:
      tensors: those in the files, by name.
      config: of the model.
      where: the folder, for messages.

    Raises:
      Refusal: a scale is NaN, infinite, zero or negative, or of a shape that it cannot have, a zero beside one is another
        number than 0, or it has a name that jspec does not know; the message has its name.
    """
    scales, missing, what = [], [], "keys and values" if config.latent is None else "latents"
    for number in range(config.num_layers):
        G = config.layer(number).num_kv_heads if config.latent is None else 1
        names = _names_of_layer(config, number)
        found = _found(tensors, names)
        caches = config.layer(number).reads_cache_of is None and not config.has_delta_net(number)
        missing += [each[0] for each, name in zip(names, found, strict=True) if caches and name is None]
        if caches and config.latent is None and None in found:
            _require_known(tensors, names, where)
        for name in found:
            _require_no_zero(tensors, name, where)
        scales.append(
            tuple(np.ones(G, np.float32) if name is None else _read(tensors[name], G, where) for name in found)
        )
    if missing:
        warnings.warn(
            f"{where}: holds no {missing[0]!r}, nor {len(missing) - 1} other scales of {what}, which are taken to "
            "be 1; what is beyond 448 in magnitude is cut off in the cache",
            stacklevel=2,
        )
    return scales


def scales_that_count(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Those of ``tensors`` that ``cache_scales`` reads."""
    layers = (_names_of_layer(config, number) for number in range(config.num_layers))
    return {name: tensors[name] for names in layers for name in _found(tensors, names) if name is not None}


def _found(tensors: Mapping[str, Tensor], names: list[list[str]]) -> list[str | None]:
    """The name of the tensor of scales of keys, and that of values, of a layer, or that of latents; None for one that is
    not there."""
    return [next((name for name in each if name in tensors), None) for each in names]


def _names_of_layer(config: ModelConfig, number: int) -> list[list[str]]:
    """The names that the scales of keys, and those of values, or that of latents may have, of which the first that is there
    counts."""
    names = names_of(config.architecture)
    layer = f"{names.prefix}layers.{number}."
    module = layer + names.out.rpartition(".")[0]
    if config.latent is not None:  # as Model Optimizer, SGLang and vLLM call it
        return [
            [f"{module}.k_proj.k_scale", f"{layer}{names.latent_down}.k_scale", f"{module}.mla_attn.mla_attn.k_scale"]
        ]
    maps = (names.qkv, names.qkv) if isinstance(names.qkv, str) else names.qkv[1:]
    both = []
    for letter, projection in zip("kv", maps, strict=True):
        own = [f"{module}.{place.format(letter)}{letter}_scale" for place in _PLACES]
        own.append(f"{layer}{projection}.{letter}_scale")
        if not isinstance(names.qkv, str):  # what compressed-tensors once wrote
            own.append(f"{layer}{projection}.output_scale")
        both.append([*own, f"{module}.kv_scale", f"{module}.attn.kv_scale"])
    return both


def _require_known(tensors: Mapping[str, Tensor], names: list[list[str]], where: str):
    """Raise a ``Refusal`` if a layer's attention has scales of keys or values under a name that is none of ``names``, which
    would count as 1."""
    module = names[0][0].removesuffix("k_scale")
    for name in tensors.keys() - set(itertools.chain(*names)):
        if name.startswith(module) and _SCALE.fullmatch(name, len(module)):
            raise Refusal(
                f"{where}/{tensors[name].file}: tensor {name!r} seems to be the scale of cached keys or values: expected it "
                f"as {names[0][0]!r}; rename it, or cache them in the dtype of the model (kv_cache_dtype)"
            )


def _require_no_zero(tensors: Mapping[str, Tensor], scale: str | None, where: str):
    """Raise a ``Refusal`` if the zero beside a tensor of scales is another number than 0."""
    name = "" if scale is None else f"{scale.removesuffix('_scale')}_zero_point"
    if name in tensors and (numbers := tensors[name].read().astype(np.float32)).any():
        raise Refusal(
            f"{where}/{tensors[name].file}: tensor {name!r} holds {numbers[numbers != 0].flat[0]}: expected 0, because keys "
            "and values are rounded symmetrically; cache them in the dtype of the model (kv_cache_dtype)"
        )


def _read(tensor: Tensor, heads: int, where: str) -> np.ndarray:
    """The scales of ``heads`` KV heads, float32, from one number or as many."""
    if tensor.shape not in ((), (1,), (1, 1), (1, 1, 1), (heads,), (heads, 1), (heads, 1, 1)):
        raise Refusal(
            f"{where}/{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}: expected one number, or "
            f"{[heads, 1, 1]}, a scale for each KV head; fetch it again"
        )
    return np.broadcast_to(read_scales(tensor).reshape(-1), heads).copy()
