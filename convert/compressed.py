"""Writes a quantised language model as a Hugging Face folder in the formats of compressed-tensors, which transformers, vLLM
and jspec load.

| quantize | format of compressed-tensors | tensors of a map |
|---|---|---|
| ``int8`` | ``pack-quantized``, 8 bits, a scale for each output channel | ``weight_packed``, ``_scale``, ``_shape`` |
| ``int4`` | ``pack-quantized``, 4 bits, a scale for each 128 inputs | the same |
| ``fp8`` | ``float-quantized``, a scale for each output channel | ``weight``, ``weight_scale`` |

Numbers and scales are those of ``jspec.models.quantization``. The maps of the layers are quantised, all in one format, and
the output head is not, because other engines do not expect that. All other tensors are copied as they are, with those of
scales of a cache in eight bits, which config.json then asks for as the original does. Activations are not quantised."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from convert.staging import require_apart, staged
from convert.write import COPIED, copied_files
from jspec._validation import require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.converted.manifest import is_converted
from jspec.checkpoints.export import save_weights
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import read_fields
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.quantized.cache_scheme import SCHEME, cache_scheme
from jspec.config import QUANTIZATIONS, ModelConfig
from jspec.models.quantization import quantize as quantize_weight
from jspec.quantization.codes import unpack_codes
from jspec.quantization.formats import GROUP

WEIGHT, INDEX = ".weight", "model.safetensors.index.json"
MARK = "jspec_export.json"  # which tells a folder of ours, that may be replaced, from others
SHARD_BYTES = 4 * 2**30
_FOR_JSPEC = "without --format it can be quantised for jspec alone"
_WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
}


def export_quantized(
    src: str | os.PathLike,
    out: str | os.PathLike,
    quantize: str,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Write the language model in the folder ``src``, quantised, to the folder ``out``; returns its place.

    ``out`` appears complete or not at all.

    Args:
      src: a folder with config.json and safetensors, of weights that are not quantised.
      out: the folder to create.
      quantize: ``int8``, ``fp8`` or ``int4``.
      overwrite: whether to replace an existing folder of this function's once the new one is complete.
      progress: whether to show a progress bar if stderr is a terminal.

    Raises:
      Refusal: one sentence with the file and the reason.
    """
    require(quantize in QUANTIZATIONS, "quantize", quantize, f"one of {', '.join(QUANTIZATIONS)}")
    if is_converted(src):
        raise Refusal(f"{src}: is a converted folder already; give the Hugging Face folder it was made from")
    source = Checkpoint.open(src).hugging_face
    place = require_apart(out, source.folder.root)
    maps = _maps(source, quantize)
    with staged(place, overwrite, may_replace=_is_export) as partial:
        _write_weights(source, partial, maps, quantize, progress)
        for name, content in copied_files(source.folder, COPIED[1:]).items():
            (partial / name).write_bytes(content)
        config = source.folder.json("config.json") | {"quantization_config": _config(source, maps, quantize)}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (partial / MARK).write_text(json.dumps({"source": source.folder.given, "quantize": quantize}) + "\n")
    return place


def _maps(source: HuggingFaceModel, quantize: str) -> list[str]:
    """The names of the tensors to be quantised."""
    where = source.folder.given
    if not isinstance(source.config, ModelConfig):
        raise Refusal(f"{where}: holds a draft head ({source.layout.label}); other engines read none that is quantised")
    if (
        source.config.quantization is not None
        or source.layout.dequantized
        or source.layout.dequantized_instead is not None
    ):
        raise Refusal(f"{where}: quantize={quantize!r}: its weights are quantised already (quantization_config)")
    if source.layout.wholes:
        name = next(iter(source.layout.wholes.values()))
        raise Refusal(
            f"{where}: tensor {name!r} holds several maps, which the export does not take apart; {_FOR_JSPEC}"
        )
    source.require_match()
    alike = dataclasses.replace(source.config, quantization=quantize, other_formats=())
    stored = alike.stored_params()
    names = [
        name
        for name, at in source.table.items()
        if at.param in stored
        and stored[at.param].form.name == quantize
        and at.param not in ("embedding", f"head{WEIGHT}")
    ]
    for name in names:
        shape = source.tensors[name].shape
        if len(shape) != 2 or not name.endswith(WEIGHT):
            raise Refusal(f"{where}: tensor {name!r} {list(shape)} is no weight of a single linear map; {_FOR_JSPEC}")
        if shape[1] % (of := {"int4": GROUP, "int8": 4}.get(quantize, 1)):
            expected = f"expected a multiple of {of} for {quantize}"
            raise Refusal(f"{where}: tensor {name!r} has {shape[1]} inputs: {expected}; {_FOR_JSPEC}")
    return names


def _write_weights(source: HuggingFaceModel, folder: Path, maps: list[str], quantize: str, progress: bool):
    """The weights in files of about ``SHARD_BYTES``, and an index if there are several."""
    names, quantises = [*source.tensors], frozenset(maps)
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        nbytes = int(np.prod(source.tensors[name].shape)) * 4  # at most
        if size + nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else ["model.safetensors"]
    weight_map: dict[str, str] = {}
    total = 0
    with tqdm(total=len(names), unit="tensor", disable=None if progress else True) as bar:
        for file, of_file in zip(files, shards, strict=True):
            arrays: dict[str, np.ndarray] = {}
            for name in of_file:
                arrays |= dict(
                    _written(source, name, quantize) if name in quantises else [(name, source.tensors[name].read())]
                )
                bar.update()
            save_weights(folder / file, arrays)
            weight_map |= dict.fromkeys(arrays, file)
            total += sum(array.nbytes for array in arrays.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _written(source: HuggingFaceModel, name: str, quantize: str) -> Iterator[tuple[str, np.ndarray]]:
    """The names and the arrays of a quantised map."""
    weight, module = source.tensors[name].read(), name.removesuffix(WEIGHT)
    if not np.isfinite(weight).all():
        raise Refusal(f"{source.folder.given}: tensor {name!r} has NaN or infinity, which {quantize} cannot hold")
    numbers, scale = quantize_weight(weight, quantize)
    yield f"{module}.weight_scale", scale if quantize == "int4" else scale[:, None]
    if quantize == "fp8":
        yield name, numbers
        return
    if quantize == "int4":
        codes = unpack_codes(numbers, weight.shape[1])
        packed = codes[:, 0::2] | codes[:, 1::2] << 4  # the first of eight codes in the lowest bits
    else:
        packed = (numbers.astype(np.int16) + 128).astype(np.uint8)
    yield f"{module}.weight_packed", np.ascontiguousarray(packed).view("<i4")
    yield f"{module}.weight_shape", np.array(weight.shape, np.int64)


def _config(source: HuggingFaceModel, maps: list[str], quantize: str) -> Mapping[str, Any]:
    """The ``quantization_config`` of config.json."""
    no_maps = {*maps, *(name for name, at in source.table.items() if at.param == "embedding")}
    ignored = [
        name.removesuffix(WEIGHT)
        for name, tensor in source.tensors.items()
        if name not in no_maps and name.endswith(WEIGHT) and len(tensor.shape) == 2
    ]
    weights = {**_WEIGHTS[quantize], "symmetric": True, "dynamic": False}
    kind = "float-quantized" if quantize == "fp8" else "pack-quantized"
    scheme = cache_scheme(source.folder, read_fields(source.folder))
    said = None if scheme is None else scheme.value
    if scheme is not None and scheme.is_read and not isinstance(said, dict):
        said = {**SCHEME, "strategy": "tensor"}  # of Model Optimizer
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": sorted({*ignored, "lm_head"}),
        "kv_cache_scheme": said if isinstance(said, dict) else None,
    }


def _is_export(folder: Path) -> bool:
    """Whether a folder was written by ``export_quantized``."""
    return (folder / MARK).is_file()
