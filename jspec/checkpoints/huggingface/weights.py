"""Reads the weight files of a Hugging Face folder: the headers first, later the values of one tensor at a time."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.json_files import require_depth
from jspec.checkpoints.files.pickles import read_pickle_header
from jspec.checkpoints.files.ranges import Index, read_range
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import STORED_DTYPES, Tensor

SINGLE = "model.safetensors"
MEDUSA = "medusa_lm_head.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_INDEX = "pytorch_model.bin.index.json"
PICKLE_NAMES = ("pytorch_model.bin", PICKLE_INDEX, "medusa_lm_head.pt")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SOURCE_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
}


@dataclasses.dataclass(frozen=True)
class SafeTensor(Tensor):
    """A tensor in a safetensors file.

    Attributes:
      start: offset of its first number in the file, in bytes.
    """

    start: int

    def read_part(self, index: Index) -> np.ndarray:
        try:
            return read_range(self.path, STORED_DTYPES[self.dtype], self.shape, index, self.start)
        except (OSError, ValueError) as error:
            raise _damaged(self.file, error) from None


def read_headers(folder: Folder, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Tensor name -> tensor, for every tensor in the weight files of ``folder``; only headers are read.

    Args:
      folder: the folder. Its safetensors files are read if it has any, and its pickles otherwise.
      allow_pickle: whether pickles may be read; see ``jspec.checkpoints.files.pickles``.

    Raises:
      Refusal: there are only pickles and ``allow_pickle`` is False, a pickle asks for more than tensors, several files
        could be the weights, a shard lies outside the folder, a file is damaged, the index contradicts its shards, a
        tensor is stored twice, or a tensor has a dtype that cannot be converted.
    """
    if folder.has(SINGLE):
        return _header(folder, SINGLE)
    if folder.has(INDEX):
        return _sharded(folder, INDEX, ".safetensors", _header)
    if folder.has(MEDUSA):
        return _header(folder, MEDUSA)
    pickles = [name for name in PICKLE_NAMES if folder.has(name)]
    pickles = pickles or [name for name in folder.names() if name.endswith(PICKLE_SUFFIXES)]
    if not pickles:
        raise Refusal(f"{folder.given}: holds neither {SINGLE} nor {INDEX}{_how_to_name(folder)}")
    if not allow_pickle:
        raise Refusal(
            f"{folder.given}/{pickles[0]}: pickle weights are refused, because loading them can run code; convert them "
            "with jspec-convert --allow-pickle (allow_pickle=True), which reads tensors alone in a separate process, "
            "or use a safetensors copy"
        )
    if len(pickles) > 1:
        raise Refusal(f"{folder.given}: {', '.join(pickles)} could each be the weights; keep one of them")
    if pickles == [PICKLE_INDEX]:
        return _sharded(folder, PICKLE_INDEX, ".bin", read_pickle_header)
    return read_pickle_header(folder, pickles[0])


def _how_to_name(folder: Folder) -> str:
    """What the user does about safetensors files of other names; empty if the folder has none."""
    files = [name for name in folder.names() if name.endswith(".safetensors")]
    if not files:
        return ""
    if len(files) == 1:
        return f"; rename {files[0]} to {SINGLE}, if it holds all weights"
    return (
        f", and nothing says which tensors {files[0]} to {files[-1]} hold; fetch {INDEX}, or write it: "
        f'{{"weight_map": {{"name of a tensor": "{files[0]}", ...}}}} with a line for each tensor'
    )


def _sharded(
    folder: Folder, index: str, suffix: str, header: Callable[[Folder, str, str | None], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Tensor name -> tensor, for every tensor in the shards of an index.

    Args:
      folder: the folder.
      index: the file whose ``weight_map`` says which tensor is in which shard.
      suffix: what the name of every shard has to end with.
      header: reads one shard; called with the folder, the shard's name and the file that names it.
    """
    where = f"{folder.given}/{index}"
    weight_map = folder.json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(s, str) for s in weight_map.values()):
        raise Refusal(f"{where}: weight_map must be an object of tensor names and shard names")
    tensors: dict[str, Tensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not shard.endswith(suffix):
            raise Refusal(f"{where}: shard {shard!r} is refused, because only {suffix} files are read")
        held = header(folder, shard, where)
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
    """Tensor name -> tensor, for every tensor in one safetensors file; only its header is read."""
    path, where = folder.path(name, named_by), f"{folder.given}/{name}"
    try:
        with safe_open(path, framework="numpy") as file:
            views = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (a safetensors file is no mapping)
            entries = {key: (tuple(view.get_shape()), view.get_dtype()) for key, view in views.items()}
    except (SafetensorError, OSError) as error:
        raise _damaged(where, error) from None
    starts, tensors = _starts(path, where), {}
    for key, (shape, dtype) in entries.items():
        if dtype not in SOURCE_DTYPES:
            known = ", ".join(SOURCE_DTYPES)
            raise Refusal(f"{where}: tensor {key!r} is stored as {dtype}; only {known} can be converted")
        tensors[key] = SafeTensor(key, name, path, shape, SOURCE_DTYPES[dtype], starts[key])
    return tensors


def _starts(path: Path, where: str) -> dict[str, int]:
    """Tensor name -> offset of its first number in bytes, in a safetensors file that the library has opened before."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length)
        require_depth(header, where)
        entries = json.loads(header)
        return {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items() if "dtype" in entry}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise error if isinstance(error, Refusal) else _damaged(where, error) from None


def _damaged(where: str, error: Exception) -> Refusal:
    return Refusal(f"{where}: truncated, padded or damaged ({error}); fetch the file again")
