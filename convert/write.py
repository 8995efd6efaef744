"""Writes the files of a converted folder: parameters, copies of tokenizer and config files, and the manifest."""

import dataclasses
import functools
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from convert.checkpoint import LazyArray, bytes_on_disk, save_params, whole_blocks
from convert.kv_cache_entry import cache_entry
from convert.manifest import write_manifest
from convert.quantize import lazy_params
from jspec.checkpoints.converted.manifest import CACHE, PARAMS
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.json_files import limit_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import read_fields
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.layouts import stored
from jspec.checkpoints.quantized.cache_scheme import cache_scheme
from jspec.checkpoints.tokenizer import FILES, MAX_TEXT_BYTES
from jspec.config import ModelConfig

COPIED = ("config.json", "generation_config.json", *FILES)
MANIFEST_BYTES = 512  # upper bound of what the manifest takes for one file: its name twice, its size and its SHA-256


def write_folder(source: HuggingFaceModel, folder: Path, dtype: str, progress: bool) -> list[str]:
    """Write params, copied files and manifest to ``folder``.

    Returns:
      notes for the user: what is kept of a cache in eight bits, and the names of parameters with NaN or infinity.

    Raises:
      Refusal: a file is damaged, the disk is full, or scales of the cache cannot be used.
    """
    cache, cache_notes = _cache(source)
    params = lazy_params(source, dtype)
    copied = copied_files(source.folder)
    _require_space(folder, params, copied.values())
    nonfinite: list[str] = []
    with tqdm(total=len(params), unit="param", disable=None if progress else True) as bar:

        def make(name: str, array: LazyArray) -> np.ndarray:
            made = array.make()
            if not np.isfinite(made).all():
                nonfinite.append(name)
            bar.update()
            return made

        watched = {n: dataclasses.replace(a, make=functools.partial(make, n, a)) for n, a in params.items()}
        save_params(folder / PARAMS, watched)
    for name, content in copied.items():
        (folder / name).write_bytes(content)
    write_manifest(folder, _description(source, dtype) | cache)
    return cache_notes + [f"NaN or infinity in {', '.join(nonfinite)}, kept as found"] * bool(nonfinite)


def copied_files(folder: Folder, names: Sequence[str] = COPIED) -> dict[str, bytes]:
    """Name -> content of those of ``names`` that a folder has.

    Raises:
      Refusal: a file is damaged or too large.
    """
    copied = {}
    for name in filter(folder.has, names):
        if name.endswith(".json"):
            folder.json(name)  # raises a Refusal if the file is damaged
        copied[name] = folder.read(name, limit_of(name) if name.endswith(".json") else MAX_TEXT_BYTES)
    return copied


def _require_space(folder: Path, params: dict[str, LazyArray], copied: Collection[bytes]):
    """Raise a ``Refusal`` unless the disk of ``folder`` has room for everything that a conversion writes."""
    block = os.statvfs(folder).f_frsize
    need = bytes_on_disk(params, block)
    need += sum(whole_blocks(len(content), block) for content in copied)
    need += whole_blocks(MANIFEST_BYTES * (sum(1 + array.files for array in params.values()) + len(copied) + 1), block)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise Refusal(
            f"{folder.parent}: the converted folder needs {need:,} bytes and {free:,} are free on that disk; free some "
            "space, or choose another place"
        )


def _cache(source: HuggingFaceModel) -> tuple[dict, list[str]]:
    """The entry of the manifest that says how keys and values are cached, of language models alone, and notes on it."""
    if not isinstance(source.config, ModelConfig):
        return {}, []
    scheme = cache_scheme(source.folder, read_fields(source.folder))
    entry, note = cache_entry(scheme, source.tensors, source.config, source.folder.given)
    return {CACHE: entry}, [note] if note else []


def _description(source: HuggingFaceModel, dtype: str) -> dict:
    """The entries of the manifest that say what the folder was made from and what it holds."""
    model = source.config.language_model
    description = {
        "source": {
            "path": source.folder.given,
            "name_or_path": source.folder.json("config.json").get("_name_or_path"),
            "revision": source.folder.revision,
        },
        "architecture": source.layout.label,
        "dtype": dtype,
        "quantization": source.config.quantization,
        "other_formats": () if model is None else model.other_formats,
        "shared_width": 0 if model is None or model.experts is None else model.experts.shared_width,
        "draft_vocab_size": None if model is None else model.draft_vocab_size,
        "tensor_count": len(source.table),
        "parameter_count": source.config.num_parameters,
    }
    if not isinstance(source.config, ModelConfig):
        conventions = {name: getattr(source.layout, name) for name in ("aux_convention", "norm_output")}
        description["head"] = {**stored.to_json(source.config), **conventions}
    return description
