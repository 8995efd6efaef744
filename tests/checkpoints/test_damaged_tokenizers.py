"""Tokenizer files that are damaged, hostile or elsewhere: a sentence that names them, from load and from encode."""

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from resaved import set_keys
from tiny import tiny_checkpoint, tiny_tokenizer

import jspec
from convert import convert
from convert.cli import main
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.text.detokenizer import encode

SMALL = {"max_batch": 1, "max_len": 32, "page_size": 16, "prefill_chunk": 16}
VALUES = (None, -1, 2**70, 1.5, True, "x", "", "\ud800", [], {}, [[]], {"type": "BPE"}, ["<s>"], {"content": "x"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint with a tokenizer, not to be changed."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "whole", vocab_size=264, num_hidden_layers=1)
    tiny_tokenizer(folder)
    return folder


@pytest.fixture
def src(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "src")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in list(keys) for place in ((value, key), *places(value[key]))]


def mutate(rng: random.Random, file: Path):
    """Change, remove or add a value somewhere, or damage the bytes."""
    text = file.read_text()
    value = json.loads(text)
    container, key = rng.choice([place for place in places(value) if rng.random() < 0.1 or "vocab" not in str(place)])
    deed = rng.choice(("set", "set", "set", "remove", "add", "cut", "flip"))
    if deed == "set":
        container[key] = rng.choice(VALUES)
    elif deed == "remove":
        del container[key]
    elif deed == "add" and isinstance(container, dict):
        container[rng.choice(("type", "vocab_file", "tokenizer_class", "added_tokens_decoder"))] = rng.choice(VALUES)
    if deed in ("cut", "flip"):
        at = rng.randrange(len(text))
        text = text[:at] if deed == "cut" else text[:at] + chr(ord(text[at]) ^ 1 << rng.randrange(7)) + text[at + 1 :]
        file.write_text(text)
    else:
        file.write_text(json.dumps(value))


def refusal_of(folder: Path) -> str | None:
    """What loading the tokenizer and encoding a text says; None if both work."""
    try:
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        tokens = encode(tokenizer, "def f(x):\n\treturn 1", f"{folder}: tokenizer: prompt 0")
    except ValueError as refusal:
        return str(refusal)
    assert all(type(token) is int for token in tokens)
    return None


def test_mutated_tokenizers_work_or_are_refused(whole, tmp_path):
    """In one printable line that names the folder; no other exception comes out."""
    refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        folder = shutil.copytree(whole, tmp_path / str(seed))
        mutate(rng, folder / rng.choice(("tokenizer.json", "tokenizer_config.json")))
        said = refusal_of(folder)
        if said is not None:
            refused += 1
            assert said.startswith(str(folder))
            assert "tokenizer" in said.removeprefix(str(folder))
            assert "jspec-" not in said.removeprefix(str(folder))
            assert said.isprintable()
    assert refused > 10


def test_load_names_the_damaged_tokenizer_file(src):
    (src / "tokenizer.json").write_text('{"version": "1.0"}')
    words = (
        r"src: tokenizer\.json, tokenizer_config\.json give no tokenizer that works \(.+\); fetch these files again$"
    )
    with pytest.raises(Refusal, match=words):
        jspec.load(src, **SMALL)
    convert(src, src.parent / "out")  # whose parameters are sound
    with pytest.raises(Refusal, match=r"out: tokenizer\.json, tokenizer_config\.json give no tokenizer"):
        jspec.load(src.parent / "out", **SMALL)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_convert_names_the_damaged_tokenizer_file(src, capsys, name):
    """It does not run the tokenizer, and copies no file that is no JSON."""
    (src / name).write_text("[1, 2")
    assert main([str(src), str(src.parent / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"jspec-convert: {src}/{name}: cannot be read as JSON (")
    with pytest.raises(Refusal, match=name):
        jspec.load(src, **SMALL)


@pytest.mark.parametrize(
    "changes", [{"initializer_range": 2}, {"layer_types": 1}, {"rope_scaling": []}, {"vocab": 1}], ids=str
)
def test_model_settings_do_not_affect_the_tokenizer(src, changes):
    """transformers would check all of config.json to find a tokenizer; jspec reads what it needs by itself."""
    set_keys(src, **changes)
    assert load_tokenizer(src) is not None


def test_a_config_that_transformers_refuses(src, capsys):
    """A sentence too where transformers itself has to load the model."""
    pytest.importorskip("torch")
    set_keys(src, initializer_range="wide")
    assert main([str(src), str(src.parent / "out"), "--verify", "logits"]) == 2
    error = capsys.readouterr().err
    assert "src: transformers" in error
    assert "cannot load it (" in error
    assert "initializer_range" in error
    assert error.count("\n") == 1
    assert not (src.parent / "out").exists()


def test_text_that_cannot_be_encoded():
    class Broken:
        def encode(self, text):
            raise type("PanicException", (BaseException,), {})("index out of\nbounds")

    words = r"prompt 3 cannot be encoded by the checkpoint's tokenizer \(PanicException: index out of bounds\)"
    with pytest.raises(ValueError, match=words):
        encode(Broken(), "x", "prompt 3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"prompt 3 has '\\ud800' at character 1, half of a surrogate pair"):
        encode(Broken(), "x\ud800", "prompt 3")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "merges.txt"]
)
def test_links_that_leave_the_folder(src, name, tmp_path):
    if not (src / name).exists():
        (src / name).write_text("{}")
    shutil.move(src / name, tmp_path / "elsewhere")
    (src / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refusal, match=f"{name}: '{name}' is a symbolic link that leaves the folder, which is refused"):
        jspec.load(src, **SMALL)


def test_settings_that_name_files_elsewhere(src, tmp_path):
    """Neither another folder's vocabulary nor its templates are read, whatever the settings and subfolders say."""
    other = tmp_path / "tokenizer.9.json"
    tiny_tokenizer(tmp_path, first="<elsewhere>")
    (tmp_path / "tokenizer.json").rename(other)
    settings = json.loads((src / "tokenizer_config.json").read_text())
    for key, value in (
        ("tokenizer_file", str(other)),
        ("fast_tokenizer_files", [f"../{src.parent.name}/tokenizer.0.json", "tokenizer.0.json"]),
        ("vocab_file", str(other)),
        ("special_tokens_map_file", str(other)),
    ):
        (src / "tokenizer_config.json").write_text(json.dumps({**settings, key: value}))
        tokenizer = load_tokenizer(src)
        assert tokenizer is not None
        assert "<elsewhere>" not in tokenizer.get_vocab()
    (src / "additional_chat_templates").mkdir()
    (src / "additional_chat_templates" / "x.jinja").symlink_to(other)
    assert "elsewhere" not in str(getattr(load_tokenizer(src), "chat_template", ""))


def test_hub_cache_links_are_followed(src, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123abcd", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(src.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    tokenizer = load_tokenizer(snapshot)
    assert tokenizer is not None
    assert tokenizer.encode("x") == [tokenizer.get_vocab()["x"]]


LARGE = """
    import resource, sys
    from pathlib import Path
    from jspec.checkpoints.files.refusal import Refusal
    from jspec.checkpoints.files.folder import Folder
    from jspec.checkpoints.tokenizer import load_tokenizer
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (lambda folder: Folder(folder).json("config.json"), load_tokenizer):
        try:
            read(sys.argv[1])
        except Refusal as refusal:
            print(refusal)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_large_files_are_not_parsed(src):
    """100 MiB of config.json or of a tokenizer: refused by size, without the gigabytes that parsing takes."""
    for name in ("config.json", "tokenizer.json"):
        with (src / name).open("w") as file:
            file.write("[" + "0," * (50 * 2**20))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(LARGE), str(src)]
    config, tokenizer, grown = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert config == f"{src}/config.json: is larger than 1 MiB, which no such file is; fetch it again"
    assert tokenizer == f"{src}/tokenizer.json: is larger than 64 MiB, which no such file is; fetch it again"
    assert int(grown) < 100  # MiB


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_refused(src, capsys, name, opening):
    (src / name).write_text(f'{{"a[": {opening * 65}')
    assert main([str(src), str(src.parent / "out")]) == 2
    assert f"{name}: nests deeper than 64 levels, which no such file does" in capsys.readouterr().err
    with pytest.raises(Refusal, match=f"{name}: nests deeper than 64 levels"):
        jspec.load(src, **SMALL)


def test_brackets_in_strings_are_not_counted(src):
    set_keys(src, _name_or_path='\\"[' * 100, license="[" * 100)
    assert jspec.load(src, **SMALL).tokenizer is not None
