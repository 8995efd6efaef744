"""Where a checkpoint folder is taken, a GGUF file is: what is meant by a path, several parts, conversions and commands."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_checkpoint, tiny_tokenizer
from tiny_gguf import tiny_gguf

import jspec
from convert import convert, load_folder
from convert.cli import main as convert_main
from convert.verify import jspec_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.folder import gguf_in
from jspec.checkpoints.gguf.header import read_header
from jspec.checkpoints.quantized.gguf_blocks import TYPES, BlockType
from jspec.cli import main
from jspec.models.params import build

gguf = pytest.importorskip("gguf")

SMALL = {"max_len": 64, "max_batch": 1}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A file with weights of eight bits and a chat template, alone in its folder."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tmp_path_factory.mktemp("model") / "tiny-Q8_0.gguf"
    return tiny_gguf(path, more={"tokenizer.chat_template": template, "general.sampling.top_k": 7})


def text(llm) -> list[int]:
    return llm.generate("import os", temperature=0, max_tokens=8, ignore_eos=True).token_ids


def arrays(path: Path) -> dict[str, np.ndarray]:
    return dict(Checkpoint.open(path).params())


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name].view(np.uint8), other[name].view(np.uint8))
        for name in one
    )


@pytest.fixture(scope="module")
def llm(file):
    return jspec.load(file, **SMALL)


def test_a_file_or_its_folder_is_a_target_and_a_draft(file, llm, tmp_path):
    draft = tiny_gguf(tmp_path / "other" / "draft-Q4_0.gguf", "Q4_0", seed=1)
    pair = jspec.load(file.parent, draft.parent, num_draft_tokens=2, **SMALL)
    assert pair.method == "draft_model"
    assert text(pair) == text(llm)
    assert jspec.load(str(file), str(draft), num_draft_tokens=2, **SMALL).method == "draft_model"


def test_what_a_folder_means(file, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(file, folder / "a-Q8_0.gguf")
    for name in ("mmproj-F16.gguf", "a.imatrix.gguf", "a-Q4_0-00002-of-00002.gguf", "README.md", "imatrix.bin"):
        (folder / name).touch()
    (folder / "config.json").write_text("{}")  # as some repositories of GGUF files have it
    assert gguf_in(folder) == folder / "a-Q8_0.gguf"
    shutil.copy(file, folder / "B-Q4_0.GGUF")
    with pytest.raises(Refusal, match=r"holds 2 GGUF files .* \(B-Q4_0\.GGUF, a-Q8_0\.gguf\); give the path of one"):
        jspec.load(folder)
    for name in ("B-Q4_0.GGUF", "a-Q8_0.gguf"):
        (folder / name).unlink()
    with pytest.raises(Refusal, match=r"holds 0 GGUF files of language models \(a-Q4_0-00002-of-00002\.gguf, a\.im"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("beside", ["safetensors", "pickle", "converted"])
def test_a_folder_with_other_weights_is_what_it_was(file, tmp_path, beside):
    folder = tiny_checkpoint(tmp_path / "folder")
    if beside == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    if beside == "converted":
        convert(folder, folder := tmp_path / "converted")
    shutil.copy(file, folder / "model-Q8_0.gguf")
    assert gguf_in(folder) is None
    assert not Checkpoint.open(folder).folder.given.endswith("gguf")


def test_links(file, tmp_path):
    """In a folder, as of any checkpoint, they may not leave it; a path that is given may be one."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    tiny_gguf(outside / "m.gguf", files=2)
    folder.mkdir()
    (folder / "m.gguf").symlink_to(file)
    with pytest.raises(Refusal, match=r"m\.gguf'? is a symbolic link that leaves the folder"):
        Checkpoint.open(folder)
    assert same(arrays(folder / "m.gguf"), arrays(file))
    first, second = (folder / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    for part in (first, second):
        part.symlink_to(outside / part.name)
    assert Checkpoint.open(first).config == Checkpoint.open(file).config  # both lie in one folder
    second.unlink()
    second.symlink_to(shutil.copy(outside / second.name, tmp_path / "elsewhere.gguf"))
    with pytest.raises(Refusal, match=r"m-00002-of-00002\.gguf: is no file beside the first, part 2 of 2"):
        Checkpoint.open(first)


def test_parts_are_one_model(file, tmp_path):
    first = tiny_gguf(tmp_path / "m-Q8_0.gguf", files=3)
    assert same(arrays(first), arrays(file))
    assert Checkpoint.open(tmp_path).config == Checkpoint.open(first).config == Checkpoint.open(file).config


def rewritten(path: Path, key: str, value: int):
    """The file with another number under a key of two bytes or four."""
    data, name = bytearray(path.read_bytes()), key.encode()
    at = data.index(name) + len(name)
    size = {2: 2, 4: 4, 5: 4}[int.from_bytes(data[at : at + 4], "little")]
    data[at + 4 : at + 4 + size] = value.to_bytes(size, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[1].unlink(), r"m-00002-of-00003\.gguf: is no file beside the first, part 2 of 3 of the model"),
        (lambda parts: shutil.copy(parts[1], parts[2]), r"00003\.gguf: says that it is part 2 of 3: expected 3 of 3"),
        (lambda parts: shutil.copy(parts[1], parts[0]), r"is one of 3 parts of a model: give the first .* m-00001-of-00003"),
        (lambda parts: rewritten(parts[2], "split.count", 4), r"says that it is part 3 of 4: expected 3 of 3"),
        (lambda parts: rewritten(parts[0], "split.count", 2), r"is one of 2 parts of a model: give the first"),
        (lambda parts: rewritten(parts[0], "split.count", 1), r"lacks the tensor"),
        (lambda parts: rewritten(parts[0], "split.tensors.count", 12), r"parts hold 11 tensors in 11 places: expected 12"),
        (lambda parts: parts[1].write_bytes(parts[1].read_bytes().replace(b"ffn_up.w", b"attn_q.w")), "10 tensors in 11"),
        (lambda parts: parts[1].write_bytes(b"GGUF"), r"m-00002-of-00003\.gguf: has the version"),
    ],
)  # fmt: skip
def test_parts_that_are_missing_or_contradict_each_other(tmp_path, change, message):
    parts = [first := tiny_gguf(tmp_path / "m.gguf", files=3)]
    parts += [first.with_name(first.name.replace("00001-of", f"0000{number}-of")) for number in (2, 3)]
    change(parts)
    with pytest.raises(Refusal, match=message):
        _ = Checkpoint.open(first).config


def test_a_part_that_is_not_the_first(tmp_path):
    first = tiny_gguf(tmp_path / "m.gguf", files=2)
    with pytest.raises(
        Refusal, match=r"is one of 2 parts of a model: give the first one, which is called like m-00001-of"
    ):
        Checkpoint.open(str(first).replace("00001-of", "00002-of"))
    renamed = first.rename(tmp_path / "other.gguf")
    with pytest.raises(Refusal, match=r"is one of 2 parts .* called like other-00001-of-00002\.gguf"):
        Checkpoint.open(renamed)


def test_a_converted_file_is_the_same_model(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert_main([str(file), str(out), "--verify", "shapes"]) == 0
    said = capsys.readouterr().out
    assert "the weights stay in Q8_0, as they are stored" in said
    assert "int8_32_float16 weights verified: 5 params are the source's, as they are stored" in said
    assert {path.name for path in out.iterdir()} >= {"config.json", "generation_config.json", "tokenizer.json"}
    assert json.loads((out / "manifest.json").read_text())["source"]["path"] == str(file)
    one, other = Checkpoint.open(file), Checkpoint.open(out)
    assert one.config == other.config
    assert one.generation_config.raw == other.generation_config.raw
    assert other.generation_config.raw["top_k"] == 7
    assert one.tokenizer.encode("import") == other.tokenizer.encode("import")  # pyright: ignore
    assert one.tokenizer.chat_template == other.tokenizer.chat_template  # pyright: ignore
    assert same(arrays(file), arrays(out))
    tokens = [np.arange(7) * 31 % 259]
    logits = [jspec_logits(build(*load_folder(path)), tokens)[0] for path in (file, out)]
    assert np.array_equal(*logits)
    assert convert_main(["--check", str(out)]) == 0
    assert convert_main([str(file), "--dry-run"]) == 0
    assert "model.norm.weight -> norm.weight" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", [kind.name for kind in TYPES.values()])
def test_a_converted_file_has_groups_of_zeros(tmp_path, kind):
    """Which have a scale of 0 in files of any type."""
    name, [block] = "blk.0.attn_output.weight", [one for one in TYPES.values() if one.name == kind]
    file = tiny_gguf(tmp_path / "m.gguf", {"attn_output": kind}, hidden=256, tokens=())
    start = next(tensor.start for tensor in read_header(file).tensors if tensor.name == name)
    data = bytearray(file.read_bytes())
    data[start : start + 5 * block.bytes] = bytes(5 * block.bytes)
    file.write_bytes(data)
    convert(file, tmp_path / "out", verify="shapes")
    assert same(arrays(file), arrays(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_a_damaged_scale_of_a_converted_file_is_refused(tmp_path, kind, monkeypatch):
    file = tiny_gguf(tmp_path / "m.gguf", {"attn_output": kind}, hidden=256, tokens=())
    read = BlockType.array

    def damaged(block: BlockType, part: str, blocks: np.ndarray) -> np.ndarray:
        found = read(block, part, blocks)
        if part == "scale":
            found = found.copy()
            found.reshape(len(found), -1).view(np.uint8)[0, :4] = 255  # NaN of any width, and no power
        return found

    monkeypatch.setattr(BlockType, "array", damaged)
    monkeypatch.setattr(
        "jspec.checkpoints.quantized.gguf.BlockWeight._array", lambda weight, *of: weight.type.array(*of)
    )
    convert(file, tmp_path / "out")
    with pytest.raises(Refusal, match=r"out/params: parameter 'layers\.0\.attention\.out\.scale' has (a|the) scale"):
        arrays(tmp_path / "out")


def test_a_file_without_quantised_weights_is_quantised_as_any(tmp_path):
    file = tiny_gguf(tmp_path / "m.gguf", "F32")
    convert(file, tmp_path / "int8", quantize="int8", verify="shapes")
    assert Checkpoint.open(tmp_path / "int8").config.quantization == "int8"
    run = [str(file), str(tmp_path / "exported"), "--quantize", "int8", "--format", "compressed-tensors"]
    assert convert_main(run) == 0
    assert Checkpoint.open(tmp_path / "exported").tokenizer is not None
    with pytest.raises(Refusal, match=r"compares with transformers on a Hugging Face folder, and this is GGUF"):
        convert(file, tmp_path / "out", verify="logits")


@pytest.mark.parametrize("ending", [KeyboardInterrupt, OSError("full")])
def test_a_conversion_that_ends_early_leaves_nothing(file, tmp_path, monkeypatch, ending):
    def save(path, params):
        path.mkdir()
        raise ending

    monkeypatch.setattr("convert.write.save_params", save)
    with pytest.raises((KeyboardInterrupt, Refusal)):
        convert(file, tmp_path / "new" / "out")
    assert not list((tmp_path / "new").iterdir())


def test_metadata_that_json_cannot_hold_are_not_converted(tmp_path):
    file = tiny_gguf(tmp_path / "m.gguf", more={"llama.odd": float("nan")})
    expected = pytest.raises(
        Refusal, match=r"m\.gguf: gives a config\.json that cannot be written \(Out of range float"
    )
    with pytest.warns(UserWarning, match="jspec does not know llama.odd"), expected:
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_are_updated_from_files(file, llm, tmp_path):
    other = tiny_gguf(tmp_path / "m.gguf", seed=5)
    before = text(llm)
    llm.update_weights_from(other)
    assert text(llm) != before
    llm.restore()
    assert text(llm) == before
    with pytest.raises(ValueError, match=r"d\.gguf: parameter 'embedding' is .*uint8.*: expected .*int8"):
        llm.update_weights_from(tiny_gguf(tmp_path / "d.gguf", "Q4_0"))
    assert text(llm) == before


def test_commands_say_what_they_take(file, tmp_path, capsys):
    reference = tiny_checkpoint(tmp_path / "hf", vocab_size=259, num_hidden_layers=1)
    tiny_tokenizer(reference)
    absent, beside = str(tmp_path / "absent.gguf"), str(tiny_gguf(tmp_path / "d.gguf"))
    (tmp_path / "text.txt").write_text("import os\n" * 200)
    train = ["train", "--method", "medusa", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    for argv, said in (
        (["generate", absent, "x"], f"target='{absent}': expected a checkpoint folder, a GGUF file, or the name"),
        (
            ["generate", str(tmp_path / "text.txt"), "x"],
            "is a file: expected the checkpoint folder that it is in, or a GGUF",
        ),
        (["serve", absent], "is no file, and the local hub cache has no such model: expected a checkpoint folder"),
        (
            ["doctor", "--target", beside, "--reference", str(file)],
            "not a folder; give the folder that holds config.json",
        ),
        ([*train, "--target", str(tmp_path / "text.txt")], "expected a checkpoint folder, or a GGUF file"),
        ([*train, "--target", absent], "absent.gguf: cannot be read (No such file or directory)"),
    ):
        assert main(argv) == 2, argv
        assert said in " ".join(capsys.readouterr().err.split()), argv
