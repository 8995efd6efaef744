"""Files of ``torch.save``, written opcode by opcode, and the assertion that one is refused."""

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from convert import Refusal
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.pickles import read_pickle_header


def plain(value) -> bytes:
    """The opcodes that push a plain value."""
    return pickle.dumps(value, 2)[2:-1]


def named(path: str) -> bytes:
    module, _, attribute = path.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def call(path: str, *arguments: bytes) -> bytes:
    return named(path) + b"(" + b"".join(arguments) + b"tR"


def storage(kind="torch.FloatStorage", key="0", numel=6) -> bytes:
    return b"(" + plain("storage") + named(kind) + plain(key) + plain("cpu") + plain(numel) + b"tQ"


def tensor(offset=0, shape=(2, 3), strides=(3, 1), hooks: bytes | None = None, held: bytes | None = None) -> bytes:
    view = plain(offset) + plain(shape) + plain(strides) + plain(False)
    empty = call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", held or storage(), view, hooks or empty)


def state_dict(value: bytes) -> bytes:
    return b"\x80\x02}" + plain("w") + value + b"s."


def saved(folder: Path, data: bytes, compression=zipfile.ZIP_STORED, **more: bytes) -> Path:
    """An archive as torch.save lays it out, with ``data`` for data.pkl and one storage of six float32 numbers."""
    path = folder / "x.bin"
    entries = {"data.pkl": data, "byteorder": b"little", "data/0": np.arange(6, dtype=np.float32).tobytes(), **more}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(f"x/{name}", content)
    return path


def read(folder: Path) -> dict[str, np.ndarray]:
    return {name: held.read() for name, held in read_pickle_header(Folder(folder), "x.bin").items()}


def assert_refused(folder: Path, reason: str):
    """x.bin is refused, in one printable line that names it and gives ``reason``."""
    with pytest.raises(Refusal) as refusal:
        read(folder)
    message = str(refusal.value)
    assert message.startswith(f"{folder}/x.bin: ")
    assert reason in message
    assert message.isprintable()
