"""``GGUFFolder``: a GGUF file as the folder of the checkpoint that it was made from."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

from jspec.checkpoints.files.folder import MemoryFolder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.gguf.architectures import read_architecture
from jspec.checkpoints.gguf.generation import generation_fields
from jspec.checkpoints.gguf.header import Header, read_header
from jspec.checkpoints.gguf.tensors import renamed_tensors, tensors_of, with_factors
from jspec.checkpoints.gguf.tokenizer import tokenizer_files
from jspec.checkpoints.quantized.gguf import BlockWeight
from jspec.checkpoints.quantized.gguf_blocks import WIDER

SUFFIX = ".gguf"
_VISION = "mmproj"  # in the names of files with the encoders of images and sounds
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_CONFIG, _GENERATION = "config.json", "generation_config.json"


def gguf_in(path: str | os.PathLike) -> Path | None:
    """The GGUF file that is meant: ``path`` itself, or the only one in a folder without a checkpoint of another kind. None
    if it is none.

    Raises:
      Refusal: the folder holds several.
    """
    given = Path(path)
    if not given.is_dir():
        return given if given.suffix.lower() == SUFFIX else None
    names = sorted(name for name in os.listdir(given) if name.lower().endswith(SUFFIX))
    if not names or (given / _CONFIG).exists() or any(name.endswith(".safetensors") for name in os.listdir(given)):
        return None
    models = [name for name in names if _VISION not in name.lower() and not _is_later_part(name)]
    if len(models) != 1:
        listed = ", ".join(models or names)
        raise Refusal(f"{path}: holds {len(models)} GGUF files of language models ({listed}); give the path of one")
    return given / models[0]


def _is_later_part(name: str) -> bool:
    """Whether a file is one of several parts, but not the first."""
    found = _SPLIT.fullmatch(name)
    return found is not None and int(found[2]) != 1


class GGUFFolder(MemoryFolder):
    """The files of the checkpoint that a GGUF file was made from, as far as it says what they hold.

    Args:
      file: the file, or the first of its parts, which lie side by side.
      given: what the user gave, for messages.

    Raises:
      Refusal: a file cannot be read, or a part is missing.
    """

    def __init__(self, file: Path, given: str):
        self._headers = _parts(file)
        first = self._headers[0]
        files: dict[str, Callable[[], dict]] = {
            _CONFIG: lambda: self._read[0],
            _GENERATION: lambda: self._generation[0],
        }
        super().__init__(given, files)
        if "tokenizer.ggml.model" in first.metadata:
            names = ("tokenizer.json", "tokenizer_config.json")
            files |= {name: functools.partial(lambda name: self._tokenizer[name], name) for name in names}
        self.root = file.resolve()

    @property
    def notes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        beside = sorted(p.name for p in self.root.parent.glob(f"*{SUFFIX}") if _VISION in p.name.lower())
        vision = f"{beside[0]}, the encoder of images beside it, is left out" if beside else ""
        return tuple(note for note in (vision, self._generation[1], self._wider) if note)

    @property
    def _wider(self) -> str:
        """The sentence for the user on types that are kept in wider codes than the file has."""
        more: dict[str, int] = {}
        for weight in self.tensors.values():
            if isinstance(weight, BlockWeight):
                rows, inputs = weight.shape
                extra = (
                    weight.type.form.bytes((rows, inputs)) - rows * inputs // weight.type.weights * weight.type.bytes
                )
                more[weight.type.name] = more.get(weight.type.name, 0) + extra
        wider = {name: extra for name, extra in more.items() if name in WIDER}
        if not wider:
            return ""
        more_bytes = f"{sum(wider.values()) / 1e6:,.0f} MB more than in the file"
        return f"{' and '.join(wider)} are kept in wider codes, which take {more_bytes}"

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Tensor name in the checkpoint -> tensor."""
        return renamed_tensors(self._read[1], self._stored)

    @functools.cached_property
    def _stored(self) -> dict[str, Tensor]:
        """The tensors of all parts by their names there."""
        found: dict[str, Tensor] = {}
        for header in self._headers:
            found |= tensors_of(header)
        return with_factors(found)

    @functools.cached_property
    def _read(self):
        return read_architecture(self._whole)

    @functools.cached_property
    def _generation(self):
        return generation_fields(self._headers[0])

    @functools.cached_property
    def _tokenizer(self) -> dict[str, dict]:
        return tokenizer_files(self._headers[0])

    @property
    def _whole(self) -> Header:
        """The header of the first part with the tensors of all, but for numbers that belong to others of them."""
        tensors = tuple(one for header in self._headers for one in header.tensors if one.name in self._stored)
        return self._headers[0]._replace(tensors=tensors)


def _parts(file: Path) -> list[Header]:
    """The headers of the parts of a file, or its own."""
    first = read_header(file)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return [first]
    found = _SPLIT.fullmatch(file.name)
    if found is None or int(found[3]) != count or first.metadata.get("split.no") != 0:
        expected = (
            f"{file.stem}-00001-of-{count:05d}{SUFFIX}" if found is None else f"{found[1]}-00001-of-{count:05d}{SUFFIX}"
        )
        raise Refusal(
            f"{file}: is one of {count} parts of a model: give the first one, which is called like {expected}"
        )
    headers = [first]
    for number in range(2, count + 1):
        path = file.with_name(f"{found[1]}-{number:05d}-of-{found[3]}{SUFFIX}")
        if not path.is_file():
            raise Refusal(f"{path}: is missing, part {number} of {count} of the model; download it")
        headers.append(read_header(path))
        if headers[-1].metadata.get("split.no") != number - 1:
            raise Refusal(f"{path}: says that it is part {headers[-1].metadata.get('split.no')}: expected {number - 1}")
    names = [tensor.name for header in headers for tensor in header.tensors]
    if len(names) != len(set(names)) or len(names) != first.metadata.get("split.tensors.count", len(names)):
        raise Refusal(
            f"{file}: its parts hold {len(names)} tensors: expected {first.metadata.get('split.tensors.count')}"
        )
    return headers
