"""The safetensors files of a Hugging Face folder: what they hold, from their headers, and one tensor at a time."""

import dataclasses
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from convert.folder import Folder
from convert.refusal import Refusal

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SOURCE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor on disk: its file's name and real path, shape, and dtype (``float32``, ``bfloat16``, ``float16``)."""

    name: str
    file: str
    path: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """The values. The file is mapped for this call only, so that its pages do not add up in memory."""
        try:
            with safe_open(self.path, framework="numpy") as file:
                return file.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise _damaged(self.file, error) from None


def read_headers(folder: Folder) -> dict[str, Tensor]:
    """Name -> tensor of every weight in ``folder``; reads headers only.

    Raises:
      Refusal: pickle instead of safetensors, a shard outside the folder, a damaged file, an index that disagrees with
        its shards, a tensor stored twice, or one of a dtype that cannot be converted.
    """
    if folder.has(SINGLE):
        return _header(folder, SINGLE)
    if folder.has(INDEX):
        return _sharded(folder)
    pickles = [name for name in folder.names() if name.endswith(PICKLES)]
    if pickles:
        raise Refusal(
            f"{folder.given}/{pickles[0]}: pickle weights are refused, because loading them runs code; "
            "use a safetensors copy of the checkpoint"
        )
    raise Refusal(f"{folder.given}: holds neither {SINGLE} nor {INDEX}")


def _sharded(folder: Folder) -> dict[str, Tensor]:
    where = f"{folder.given}/{INDEX}"
    weight_map = folder.json(INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(s, str) for s in weight_map.values()):
        raise Refusal(f"{where}: weight_map must be an object of tensor names and shard names")
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not shard.endswith(".safetensors"):
            raise Refusal(f"{where}: shard {shard!r} is refused, because only .safetensors files are read")
        held = _header(folder, shard, named_by=where)
        listed = {name for name, at in weight_map.items() if at == shard}
        for name in sorted(listed - held.keys()):
            raise Refusal(f"{where}: puts tensor {name!r} in {shard}, which does not hold it")
        for name in sorted(held.keys() - listed):
            at = weight_map.get(name)
            reason = "the index does not list" if at is None else f"the index puts in {at}: it is stored twice"
            raise Refusal(f"{folder.given}/{shard}: holds tensor {name!r}, which {reason}")
        tensors |= held
    return tensors


def _header(folder: Folder, name: str, named_by: str | None = None) -> dict[str, Tensor]:
    path, where = folder.path(name, named_by), f"{folder.given}/{name}"
    tensors = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                view = file.get_slice(key)
                tensors[key] = Tensor(key, name, path, tuple(view.get_shape()), view.get_dtype())
    except (SafetensorError, OSError) as error:
        raise _damaged(where, error) from None
    for key, tensor in tensors.items():
        if tensor.dtype not in SOURCE_DTYPES:
            known = ", ".join(SOURCE_DTYPES)
            raise Refusal(f"{where}: tensor {key!r} is stored as {tensor.dtype}; only {known} can be converted")
        tensors[key] = dataclasses.replace(tensor, dtype=SOURCE_DTYPES[tensor.dtype])
    return tensors


def _damaged(where: str, error: Exception) -> Refusal:
    return Refusal(f"{where}: truncated, padded or damaged ({error}); fetch the file again")
