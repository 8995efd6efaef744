"""The entry ``kv_cache`` of a manifest: what the original checkpoint says of a cache in eight bits, and its scales.

The entry holds the key and the value of the original file, and under ``scales`` the numbers of each tensor of scales, by its
name. Both are then read as those of a Hugging Face folder are, so that they mean the same. An entry that is null says that
there was nothing of the kind. Folders that earlier versions wrote have no entry."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.converted.manifest import CACHE, NAME, SCALES
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.tensor import Derived, Tensor
from jspec.checkpoints.quantized.cache_scheme import SCHEMES, CacheScheme


def scheme_of(manifest: Mapping[str, Any], folder: Folder) -> CacheScheme | None:
    """What the original checkpoint of a converted folder says of its cache, as ``cache_scheme`` returns it."""
    entry = manifest.get(CACHE) or {}
    found = ((key, entry[key]) for key in SCHEMES if key in entry)
    return next((CacheScheme(f"{folder.given}/{NAME}", key, value) for key, value in found), None)


def scales_of(manifest: Mapping[str, Any], folder: Folder) -> dict[str, Tensor]:
    """The tensors of scales that stand in the manifest, by name."""
    scales, path = (manifest.get(CACHE) or {}).get(SCALES, {}), folder.root / NAME
    with np.errstate(over="ignore"):  # infinity is no scale, and refused as such
        numbers = {name: np.array(values, np.float32) for name, values in scales.items()}
    return {name: Derived(name, NAME, path, values.shape, "float32", values) for name, values in numbers.items()}
