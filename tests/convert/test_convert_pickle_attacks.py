"""Pickles that are after more than tensors: refused by name, before anything of them runs."""

import os
import pickle
import resource
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from archives import assert_refused, call, named, plain, read, saved, state_dict, storage, tensor


def text(string: str) -> bytes:
    return b"\x8c" + struct.pack("B", len(string)) + string.encode()


def attacks(canary: Path) -> dict[str, tuple[bytes, str]]:
    """Name -> a data.pkl that would create ``canary``, and the name or opcode that gives it away."""
    command = plain(f"touch {canary}")
    system = call("posix.system", command)
    write = f"import pathlib; pathlib.Path({str(canary)!r}).touch()"

    class Bomb:
        def __init__(self, function, *arguments):
            self.reduced = function, arguments

        def __reduce__(self):
            return self.reduced

    return {
        "reduce": (pickle.dumps({"w": Bomb(os.system, f"touch {canary}")}, 2), "posix.system"),
        "exec": (pickle.dumps({"w": Bomb(exec, write)}, 4), "builtins.exec"),
        "exec by its name of Python 2": (pickle.dumps({"w": Bomb(exec, write)}, 2), "__builtin__.exec"),
        "memoised strings": (
            b"\x80\x04" + text("system") + b"\x94" + text("posix") + b"\x94h\x01h\x00\x93" + command + b"\x85R.",
            "posix.system",
        ),
        "attribute of an allowed name": (
            state_dict(text("torch") + text("_utils._rebuild_tensor.__globals__") + b"\x93"),
            "torch._utils._rebuild_tensor.__globals__",
        ),
        "inst": (b"\x80\x02(" + command + b"iposix\nsystem\n.", "posix.system"),
        "obj": (b"\x80\x02(" + named("posix.system") + command + b"o.", "posix.system"),
        "obj of an allowed name": (b"\x80\x02(" + named("collections.OrderedDict") + b"o.", "OBJ"),
        "newobj": (b"\x80\x02" + named("subprocess.Popen") + command + b"\x85\x81.", "subprocess.Popen"),
        "newobj of an allowed name": (b"\x80\x02" + named("collections.OrderedDict") + b")\x81.", "NEWOBJ"),
        "extension registry": (b"\x80\x02\x82\x01" + command + b"\x85R.", "EXT1"),
        "class in a persistent id": (state_dict(tensor(held=storage("posix.system"))), "posix.system"),
        "call in a persistent id": (b"\x80\x02(" + plain("storage") + system + b"tQ.", "posix.system"),
        "module in a persistent id": (b"\x80\x02(" + plain("module") + system + b"tQ.", "posix.system"),
        "persistent id of another kind": (b"\x80\x02(" + plain("module") + plain("x") + b"tQ.", "persistent id"),
        "textual persistent id": (b"\x80\x02Pstorage\n.", "PERSID"),
        "hooks that are called": (state_dict(tensor(hooks=system)), "posix.system"),
        "hooks": (state_dict(tensor(hooks=plain({"0": "f"}))), "hooks"),
        "call of a storage": (state_dict(call("torch.FloatStorage", command)), "calls torch.FloatStorage"),
        "call of a result": (state_dict(call("collections.OrderedDict") + b")R"), "calls a dict"),
        "storage that is a function": (
            state_dict(tensor(held=storage("torch._utils._rebuild_tensor"))),
            "storage of no known type",
        ),
        "state of a tensor": (state_dict(tensor() + plain({"__class__": 0}) + b"b"), "changes a View"),
        "state of a function": (state_dict(named("torch._utils._rebuild_tensor") + plain({}) + b"b"), "changes a Name"),
        "item of a function": (b"\x80\x02" + named("torch._utils._rebuild_tensor") + command + command + b"s.", "Name"),
        "behind the end": (state_dict(tensor()) + b"\x80\x02" + system + b".", "behind the end"),
        "unreached, behind a name": (state_dict(named("shutil.rmtree") + system), "shutil.rmtree"),
    }


@pytest.mark.parametrize("attack", attacks(Path()))
def test_attacks_do_not_run(tmp_path, attack):
    data, reason = attacks(tmp_path / "canary")[attack]
    saved(tmp_path, data)
    assert_refused(tmp_path, reason)
    (tmp_path / "x.bin").write_bytes(data)  # the pickle alone, which is how files before PyTorch 1.6 begin
    assert_refused(tmp_path, "x.bin" if attack == "behind the end" else reason)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("attack", ["reduce", "exec", "memoised strings", "inst"])
def test_attack_would_work(tmp_path, attack):
    """The canaries above live because of the reader."""
    data, _ = attacks(tmp_path / "canary")[attack]
    pickle.loads(data)
    assert (tmp_path / "canary").exists()


def test_honest_archive_is_read(tmp_path):
    """The refusals here are due to their edits."""
    saved(tmp_path, state_dict(tensor()))
    assert np.array_equal(read(tmp_path)["w"], np.arange(6, dtype=np.float32).reshape(2, 3))


DAMAGED = [{"shape": (2, 3), "strides": (1,)}, {"shape": 6, "strides": 1}]


@pytest.mark.parametrize(
    "view",
    [
        {"offset": 1},
        {"offset": -1},
        {"offset": 2**62},
        {"offset": 0.0},
        {"offset": True},
        {"shape": (3, 3)},
        {"shape": (-2, -3)},
        {"shape": (2**32, 2**32), "strides": (0, 0)},
        {"shape": (7,), "strides": (0,)},
        {"shape": (0, 2**41)},
        {"shape": (2, 3), "strides": (4, 1)},
        {"shape": (2, 3), "strides": (-3, 1)},
        {"shape": (2, 3), "strides": (2**62, 1)},
        *DAMAGED,
    ],
    ids=str,
)
def test_view_that_leaves_its_storage_or_makes_no_sense(tmp_path, view):
    saved(tmp_path, state_dict(tensor(**view)))
    assert_refused(tmp_path, "damaged" if view in DAMAGED else "storage")


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (storage(numel=7), "holds 24 of the 28 bytes of tensor 'w'"),
        (storage("torch.DoubleStorage"), "holds 24 of the 48 bytes"),
        (storage(numel=-1), "without a key or a size"),
        (storage(numel=2**41), "without a key or a size"),
        (storage(key="1"), "damaged"),
        (storage(key="../data.pkl"), "damaged"),
        (plain("0"), "storage"),
    ],
)
def test_storage_that_is_not_there(tmp_path, held, reason):
    saved(tmp_path, state_dict(tensor(held=held)))
    assert_refused(tmp_path, reason)


def test_compressed_archive(tmp_path):
    saved(tmp_path, state_dict(tensor()), zipfile.ZIP_DEFLATED)
    assert_refused(tmp_path, "compresses or encrypts 'x/data.pkl'")


def test_name_stored_twice(tmp_path):
    path = saved(tmp_path, state_dict(tensor()))
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("x/data/0", bytes(24))
    assert_refused(tmp_path, "holds 'x/data/0' twice")


def test_archive_without_one_pickle(tmp_path):
    path = saved(tmp_path, state_dict(tensor()))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("y/data.pkl", b"")
    assert_refused(tmp_path, "2 data.pkl")


def test_big_endian(tmp_path):
    saved(tmp_path, state_dict(tensor()), byteorder=b"big")
    assert_refused(tmp_path, "big-endian")


def test_huge_pickle(tmp_path):
    saved(tmp_path, bytes(2**24 + 1))
    assert_refused(tmp_path, "more than 16777216 bytes")


def test_entry_that_ends_behind_the_file(tmp_path):
    path = saved(tmp_path, state_dict(tensor(held=storage(numel=2**30))))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"x/data/0") - 46  # its record in the central directory
    data[at + 20 : at + 28] = struct.pack("<II", 2**31, 2**31)
    path.write_bytes(data)
    assert_refused(tmp_path, "truncated or damaged")


def test_truncated_anywhere(tmp_path):
    path = saved(tmp_path, state_dict(tensor()))
    whole = path.read_bytes()
    for cut in range(0, len(whole), len(whole) // 12):
        path.write_bytes(whole[:cut])
        assert_refused(tmp_path, "x.bin")


def test_depth_that_crashes_a_reader(tmp_path):
    saved(tmp_path, b"\x80\x02})" + b"\x85" * 200_000 + plain(0) + b"s.")
    assert_refused(tmp_path, "x.bin: ")


def of_shape(shape: bytes, strides: bytes) -> bytes:
    view = plain(0) + shape + strides + plain(False)
    return call("torch._utils._rebuild_tensor_v2", storage(), view, call("collections.OrderedDict"))


def long_tuple(length: int) -> bytes:
    return b"(" + b"K\x02" * length + b"t"


def doubled(times: int) -> bytes:
    """A tuple of two that are one and the same, and so on: the memo makes it short, and walking it is forever."""
    return b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(times))


COLLIDING = b"".join(b"\x8a\x10" + (i * (2**61 - 1)).to_bytes(16, "little") + b"N" for i in range(30_000))
COSTLY = {
    "two million dimensions": (state_dict(of_shape(long_tuple(2_000_000), long_tuple(2_000_000))), "opcodes"),
    "many dimensions": (state_dict(of_shape(long_tuple(200_000), long_tuple(200_000))), "200000 dimensions"),
    "nine dimensions": (state_dict(tensor(shape=(1,) * 9, strides=(1,) * 9)), "9 dimensions"),
    "nested tuples": (b"\x80\x02})" + b"\x85" * 4_000_000 + plain(0) + b"s.", "opcodes"),
    "a key that takes years to hash": (b"\x80\x02}(" + doubled(60) + b"t" + plain(0) + b"s.", "a tuple for a key"),
    "keys of one hash": (b"\x80\x02}(" + COLLIDING + b"u.", "a int for a key"),
    "a dict made of a list": (state_dict(call("collections.OrderedDict", b"]")), "damaged"),
    "a call with many arguments": (state_dict(call("collections.OrderedDict", b"N" * 9)), "other arguments"),
    "a long persistent id": (state_dict(b"(" + plain("storage") + b"N" * 9 + b"tQ"), "persistent id"),
    "a memo that grows": (b"\x80\x02N" + b"\x94" * 2_000_000 + b".", "opcodes"),
}


@pytest.mark.parametrize("case", COSTLY)
def test_pickles_that_would_take_long_are_refused_at_once(tmp_path, case):
    data, reason = COSTLY[case]
    saved(tmp_path, data)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert_refused(tmp_path, reason)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 5  # seconds of a processor, mostly to read a million opcodes


def test_files_without_a_pickle_are_refused(tmp_path):
    for content in (b"", b"version https://git-lfs.github.com/spec/v1\n", pickle.dumps({"w": 1}, 2)):
        (tmp_path / "x.bin").write_bytes(content)
        assert_refused(tmp_path, "x.bin")
