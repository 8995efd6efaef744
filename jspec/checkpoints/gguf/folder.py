"""``GGUFFolder``: a GGUF file as the folder of the checkpoint that it was made from."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

from jspec.checkpoints.converted.manifest import is_converted
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder, MemoryFolder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.gguf.architectures import read_architecture
from jspec.checkpoints.gguf.generation import generation_fields
from jspec.checkpoints.gguf.header import Header, read_header
from jspec.checkpoints.gguf.names import holds_gguf_alone, is_gguf, language_models, parts_of
from jspec.checkpoints.gguf.tensors import renamed_tensors, tensors_of, with_factors
from jspec.checkpoints.gguf.tokenizer import tokenizer_files
from jspec.checkpoints.gguf.vocabulary import MODEL, NONE
from jspec.checkpoints.quantized.gguf import BlockWeight
from jspec.checkpoints.quantized.gguf_blocks import WIDER

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_SPLIT = "split."  # how keys begin that say which part of a model a file is


def gguf_in(path: str | os.PathLike) -> Path | None:
    """The GGUF file that is meant: ``path`` itself, or the only one in a folder without weights of another kind. None if it
    is none.

    Raises:
      Refusal: the folder holds several, or the file lies outside of it.
    """
    given = Path(path)
    if not given.is_dir():
        return given if is_gguf(given.name) else None
    folder = Folder(given)
    names = folder.names()
    if not holds_gguf_alone(names) or is_converted(given):
        return None
    models = language_models(names)
    if len(models) != 1:
        listed = ", ".join(models or filter(is_gguf, names))
        raise Refusal(f"{path}: holds {len(models)} GGUF files of language models ({listed}); give the path of one")
    folder.path(models[0])
    return given / models[0]


class GGUFFolder(MemoryFolder):
    """The files of the checkpoint that a GGUF file was made from, as far as it says what they hold.

    Args:
      file: the file, or the first of its parts, which lie side by side.
      given: what the user gave, for messages.

    Raises:
      Refusal: a file cannot be read, or a part is missing.
    """

    def __init__(self, file: Path, given: str):
        self._file, self._headers = file, _parts(file)
        first = self._headers[0]
        files: dict[str, Callable[[], dict]] = {
            _CONFIG: lambda: self._read[0],
            _GENERATION: lambda: self._generation[0],
        }
        super().__init__(given, files)
        if str(first.metadata.get(MODEL, NONE[0])) not in NONE:
            names = ("tokenizer.json", "tokenizer_config.json")
            files |= {name: functools.partial(lambda name: self._tokenizer[name], name) for name in names}
        self.root = file.resolve()

    @property
    def notes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        here = os.listdir(self._file.absolute().parent)
        beside = sorted(name for name in here if is_gguf(name) and "mmproj" in name.lower())
        vision = f"{beside[0]}, the encoder of images beside it, is left out" if beside else ""
        return tuple(note for note in (vision, self._generation[1], self._wider) if note)

    @property
    def _wider(self) -> str:
        """The sentence for the user on types that are kept in wider codes than the file has."""
        wider: dict[str, int] = {}
        for weight in self.tensors.values():
            if isinstance(weight, BlockWeight) and (kind := weight.type).name in WIDER:
                rows, inputs = weight.shape
                extra = kind.form.bytes((rows, inputs)) - rows * inputs // kind.weights * kind.bytes
                wider[kind.name] = wider.get(kind.name, 0) + extra
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
    def revision(self) -> str | None:
        """The commit hash if the file is in a snapshot of a hub cache, else None."""
        return next((place.name for place in self._file.absolute().parents if place.parent.name == "snapshots"), None)

    @property
    def _whole(self) -> Header:
        """The header of the first part with the tensors of all, but for numbers that belong to others of them."""
        tensors = tuple(one for header in self._headers for one in header.tensors if one.name in self._stored)
        metadata = {key: value for key, value in self._headers[0].metadata.items() if not key.startswith(_SPLIT)}
        return self._headers[0]._replace(tensors=tensors, metadata=metadata)


def _parts(file: Path) -> list[Header]:
    """The headers of the parts of a file, or its own."""
    first = read_header(file)
    count, number = (_split(first, key, default) for key, default in (("count", 1), ("no", 0)))
    if count <= 1:
        return [first]
    names = parts_of(file.name)
    if len(names) != count or number != 0 or file.name != names[0]:
        stem = file.stem if len(names) == 1 else file.stem[: -len("-00001-of-00001")]
        raise Refusal(
            f"{file}: is one of {count} parts of a model: give the first one, which is called like "
            f"{stem}-00001-of-{count:05d}.gguf"
        )
    headers, places = [first], {file.parent.resolve(), file.resolve().parent}
    for place, name in enumerate(names[1:], 1):
        path = file.with_name(name)
        if not path.is_file() or path.resolve().parent not in places:
            raise Refusal(f"{path}: is no file beside the first, part {place + 1} of {count} of the model; download it")
        headers.append(read_header(path))
        says = _split(headers[-1], "no", 0) + 1, _split(headers[-1], "count", 1)
        if says != (place + 1, count):
            raise Refusal(f"{path}: says that it is part {says[0]} of {says[1]}: expected {place + 1} of {count}")
    names = [tensor.name for header in headers for tensor in header.tensors]
    told = _split(first, "tensors.count", len(names))
    if len(names) != len(set(names)) or len(names) != told:
        raise Refusal(
            f"{file}: its parts hold {len(set(names))} tensors in {len(names)} places: expected {told} in all"
        )
    return headers


def _split(header: Header, key: str, default: int) -> int:
    return Fields(header.metadata, header.where).integer(f"{_SPLIT}{key}", default, low=0)
