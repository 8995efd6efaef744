"""GGUF files by the names of their repositories: which file is meant, what of it is downloaded, and what the cache has."""

from pathlib import Path

import pytest
from tiny_gguf import tiny_gguf

import jspec
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.names import called, language_models, tag_of, tags_of
from jspec.cli import main
from jspec.commands.model_args import checkpoint_folder
from jspec.hub.folders import local_checkpoints
from jspec.hub.names import Repository, is_hub_name, repository_of

PARTS = [f"UD-Q8_K_XL/m-UD-Q8_K_XL-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
FILES = ["m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-UD-Q6_K.gguf", *PARTS, "Q3_K_S/m-00001-of-00001.gguf"]
BESIDE = ["mmproj-F16.gguf", "mmproj-m-Q8_0.gguf", "m.imatrix.gguf", "config.json", "README.md", "params"]


@pytest.fixture
def gguf_hub(hub):
    """The stand-in with a repository of GGUF files in all the ways that they are laid out."""
    hosted = hub.host("org/m-GGUF", Path("/nonexistent"))
    hosted.files |= {name: name.encode() * 500 for name in [*FILES, *BESIDE]}
    return hub


def sent(hub) -> list[str]:
    return sorted(name for name, _, size in hub.sent if size)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "q4_k_m"),
        ("llama-2-7b.Q4_K_M.gguf", "Q4_K_M"),
        ("Model.i1-IQ3_XXS.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
        ("UD-TQ1_0/m-00001-of-00002.gguf", "UD-TQ1_0"),
        ("BF16/Qwen3-BF16-00001-of-00003.gguf", "BF16"),
        ("Phi-3-mini-4k-instruct-fp16.GGUF", "fp16"),
        ("UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("m-Q4_K_M-imat.gguf", "m-Q4_K_M-imat.gguf"),
        ("sub/Qwen3-8B.gguf", "sub/Qwen3-8B.gguf"),
    ],
)
def test_the_tag_of_a_file_stands_at_its_end(name, tag):
    assert tag_of(name) == tag


def test_names_that_hold_no_model_or_no_first_part_are_left_out():
    assert language_models([*BESIDE, *FILES]) == sorted({*FILES} - {*PARTS[1:]})


def test_a_tag_means_files_of_exactly_this_tag():
    names = ["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf", "m-IQ4_K_M.gguf", "a/m-Q8_0.gguf", "b/m-Q8_0.gguf"]
    assert called(names, "q4_k_m") == ["m-Q4_K_M.gguf"]
    assert called(names, "UD-Q4_K_M") == ["m-UD-Q4_K_M.gguf"]
    assert called(names, "K_M") == called(names, "M") == []
    assert called(names, "Q8_0") == ["a/m-Q8_0.gguf", "b/m-Q8_0.gguf"]
    assert called(names, "b/m-Q8_0.gguf") == ["b/m-Q8_0.gguf"]
    assert tags_of(names) == ["IQ4_K_M", "Q4_K_M", "UD-Q4_K_M", "a/m-Q8_0.gguf", "b/m-Q8_0.gguf"]


def test_names_of_repositories():
    assert repository_of("org/name@v1:Q4_K_M") == Repository("org/name", "v1", "Q4_K_M")
    assert repository_of("org/name:a/m.gguf") == Repository("org/name", file="a/m.gguf")
    assert str(repository_of("org/name@v1:Q4_K_M")) == "org/name@v1:Q4_K_M"


@pytest.mark.parametrize(
    "text",
    ["C:\\models\\m.gguf", "C:/models/m.gguf", "D:models/m", "org/name:", "org/name:../m", "org/name:a b", "org/name:Q:Q",
     "org/name:Q@v1", "org/name@a..b:Q", "http://host/m.gguf", "models/m.gguf:", "ngram", "mtp"],
)  # fmt: skip
def test_what_has_a_colon_and_is_no_name_asks_nobody(hub, text):
    assert not is_hub_name(text)
    with pytest.raises(
        Refusal, match=r"is no (folder|file), and the local hub cache has no such model: .* :Q4_K_M behind it"
    ):
        local_checkpoints([text], True)
    assert not hub.requests


@pytest.mark.parametrize(
    ("tag", "files"),
    [("Q4_K_M", FILES[:1]), ("q4_k_m", FILES[:1]), ("UD-Q4_K_XL", FILES[1:2]), ("ud-q8_k_xl", PARTS), ("Q3_K_S", FILES[-1:]),
     ("m-Q4_K_M.gguf", FILES[:1]), (PARTS[0], PARTS)],
)  # fmt: skip
def test_the_parts_of_one_file_are_downloaded(gguf_hub, capsys, tag, files):
    (place,) = local_checkpoints([f"org/m-GGUF@main:{tag}"], True)
    assert place.endswith(f"/snapshots/{gguf_hub.repositories['org/m-GGUF'].commit}/{files[0]}")
    assert sent(gguf_hub) == files
    for name in files:
        assert Path(place.removesuffix(files[0]), name).read_bytes() == name.encode() * 500
    assert f"downloading org/m-GGUF:{tag} (commit" in capsys.readouterr().err


ALL = "Q3_K_S, Q4_K_M, UD-Q4_K_XL, UD-Q6_K, UD-Q8_K_XL"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/m-GGUF:Q6_K", f"org/m-GGUF:Q6_K: no GGUF file is called so; .* as org/m-GGUF:Q3_K_S; there are {ALL}$"),
        ("org/m-GGUF:F16", f"no GGUF file is called so; .*; there are {ALL}$"),
        ("org/m-GGUF:mmproj-F16.gguf", "no GGUF file is called so"),
        ("org/m-GGUF", f"org/m-GGUF holds GGUF files: give one behind a colon, as org/m-GGUF:Q3_K_S; there are {ALL}$"),
        ("org/target:Q8_0", "org/target:Q8_0: no GGUF file is called so; .* there are Q4_K_M$"),
        (
            "org/draft:Q8_0",
            "org/draft:Q8_0: no GGUF file is called so; org/draft holds no GGUF file of a language model",
        ),
    ],
)
def test_where_no_file_is_meant_all_are_listed(gguf_hub, name, message):
    del gguf_hub.repositories["org/draft"].files["model.Q4_K_M.gguf"]
    for consent in (True, False):
        with pytest.raises(Refusal, match=message):
            local_checkpoints([name], consent)
    assert not gguf_hub.sent


def test_where_several_are_meant_they_are_listed(gguf_hub):
    gguf_hub.repositories["org/m-GGUF"].files["v2/m-Q4_K_M.gguf"] = b"another"
    with pytest.raises(Refusal, match=r"2 GGUF files are called so; give the name of one: m-Q4_K_M.gguf, v2/m-Q4_K"):
        local_checkpoints(["org/m-GGUF:Q4_K_M"], True)
    (place,) = local_checkpoints(["org/m-GGUF:v2/m-Q4_K_M.gguf"], True)
    assert sent(gguf_hub) == ["v2/m-Q4_K_M.gguf"]
    assert place.endswith("/v2/m-Q4_K_M.gguf")


def test_a_part_that_the_repository_lacks(gguf_hub):
    del gguf_hub.repositories["org/m-GGUF"].files[PARTS[1]]
    with pytest.raises(Refusal, match=f"lists no file '{PARTS[1]}', a part of the model"):
        local_checkpoints(["org/m-GGUF:UD-Q8_K_XL"], True)
    assert not gguf_hub.sent


def test_a_repository_with_other_weights_has_both(hub, folders):
    places = local_checkpoints(["org/target:Q4_K_M", "org/target"], True)
    assert Path(places[0]).name == "model.Q4_K_M.gguf"
    assert Path(places[1], "model.safetensors").exists()
    hub.down = True
    assert local_checkpoints(["org/target:Q4_K_M", "org/target"]) == places


def test_the_cache_needs_no_network(gguf_hub, capsys):
    names = ["org/m-GGUF:Q4_K_M", "org/m-GGUF:UD-Q8_K_XL"]
    places = local_checkpoints(names, True)
    gguf_hub.down = True
    assert local_checkpoints(names) == local_checkpoints(names, False) == places
    assert local_checkpoints(names[:1], True) == places[:1]  # the hub was asked in vain
    assert "the local cache's commit" in capsys.readouterr().err
    assert checkpoint_folder(names[1]) == places[1]
    with pytest.raises(Refusal, match=r"'org/m-GGUF:Q3_K_S' is no folder, and the local hub cache has no such model"):
        local_checkpoints(["org/m-GGUF:Q3_K_S"], False)
    with pytest.raises(Refusal, match=r"has org/m-GGUF:Q4_K_M and org/m-GGUF:UD-Q8_K_XL alone: expected a checkpoint"):
        local_checkpoints(["org/m-GGUF"], False)
    Path(places[1].replace("00001-of", "00002-of")).unlink()
    with pytest.raises(
        Refusal, match=rf"the local hub cache has it without {PARTS[1]}, because a download ended early"
    ):
        local_checkpoints(names[1:], False)


def test_an_existing_path_wins(gguf_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path("org/m-GGUF:Q4_K_M").touch()
    assert local_checkpoints(["org/m-GGUF:Q4_K_M"], True) == ["org/m-GGUF:Q4_K_M"]
    assert not gguf_hub.requests


def test_commands_take_them(hub, tmp_path, capsys):
    pytest.importorskip("gguf")
    tiny_gguf(tmp_path / "files" / "m-Q8_0.gguf", files=2)
    tiny_gguf(tmp_path / "files" / "m-F32.gguf", "F32", seed=1)
    hub.host("org/tiny", tmp_path / "files")
    run = ["generate", "org/tiny:q8_0", "import", "--draft", "org/tiny:F32", "--max-tokens", "4", "--max-len", "64"]
    assert main(run) == 2
    assert "'org/tiny:q8_0' is no folder" in capsys.readouterr().err
    assert main([*run, "--download"]) == 0
    assert sent(hub) == ["m-F32.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    hub.down = True
    llm = jspec.load("org/tiny:q8_0", max_len=64, max_batch=1)
    direct = jspec.load(tmp_path / "files" / "m-Q8_0-00001-of-00002.gguf", max_len=64, max_batch=1)
    texts = [one.generate("import", temperature=0, max_tokens=8, ignore_eos=True).token_ids for one in (llm, direct)]
    assert texts[0] == texts[1]
