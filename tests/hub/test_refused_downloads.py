"""Models by name: what is said where they cannot be downloaded, and that a hostile or broken hub does no harm."""

import shutil
from pathlib import Path

import pytest
from hub_server import same

from jspec.checkpoints.files.refusal import Refusal
from jspec.hub import consent, transfer
from jspec.hub.folders import local_checkpoints


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("org/absent", None, r"no such model repository \(HTTP 404\), or a private one; .* set HF_TOKEN"),
        ("org/secret", {"status": (401, "RepoNotFound")}, r"no such model repository \(HTTP 401\)"),
        ("org/gated", {"status": (401, "GatedRepo")}, r"gated \(HTTP 401\); accept .* at http.*/org/gated, .* HF_TOKEN"),
        ("org/gated", {"status": (403, "GatedRepo")}, r"gated \(HTTP 403\)"),
        ("org/gated", {"gated": True}, r"gated \(HTTP 403\)"),
        ("org/target@v9", {}, r"org/target@v9: the repository has no revision 'v9' \(any more\); give another one behind @"),
        ("org/sick", {"status": (503, "")}, r"org/sick: http.* cannot be reached \(HTTP 503\); try again"),
    ],
)  # fmt: skip
def test_refusals_of_the_hub_name_the_fix(hub, folders, name, settings, message):
    if settings is not None:
        hub.host(name.partition("@")[0], folders / "target", **settings)
    with pytest.raises(Refusal, match=message):
        local_checkpoints([name], True)
    if settings is None or "503" not in message:
        with pytest.raises(Refusal, match=message):  # the same without consent, in place of the size
            local_checkpoints([name], False)
    assert not hub.sent


def test_without_a_network_the_cache_is_taken_and_said(hub, folders, capsys, monkeypatch):
    hub.down = True
    with pytest.raises(Refusal, match=r"org/target: http.* cannot be reached \(RemoteProtocolError"):
        local_checkpoints(["org/target"], True)
    with pytest.raises(Refusal, match=r"fetches it from the hub$"):  # without a size
        local_checkpoints(["org/target"], False)
    hub.down = False
    found = local_checkpoints(["org/target"], True)
    capsys.readouterr()
    for change in (
        lambda: setattr(hub, "down", True),
        lambda: monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True),
    ):
        change()
        assert local_checkpoints(["org/target"], True) == found
        assert "the local cache's commit" in capsys.readouterr().err
    hub.requests.clear()
    with pytest.raises(Refusal, match="HF_HUB_OFFLINE forbids to ask"):
        local_checkpoints(["org/draft"], True)
    assert not hub.requests


def test_a_disk_without_room_is_refused_before_anything_comes(hub, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=consent.RESERVE + 1000)
    monkeypatch.setattr(consent.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        Refusal, match=r"org/target: \d+\.\d kB are to be downloaded to .*, whose disk has 268.4 MB free"
    ):
        local_checkpoints(["org/target"], True)
    assert not hub.sent


@pytest.mark.parametrize("longer", [False, True])
def test_other_bytes_than_listed_are_thrown_away(hub, folders, longer):
    content = hub.repositories["org/target"].files["model.safetensors"]
    hub.lies["model.safetensors"] = content + b"more" if longer else b"X" + content[1:]
    with pytest.raises(Refusal, match=r"org/target: model.safetensors has come with other bytes than the hub lists"):
        local_checkpoints(["org/target"], True)
    with pytest.raises(Refusal, match="has no such model"):
        local_checkpoints(["org/target"], False)
    hub.lies.clear()
    assert same(local_checkpoints(["org/target"], True)[0], folders / "target")


def test_small_files_are_checked_as_well(hub):
    content = hub.repositories["org/target"].files["config.json"]
    hub.lies["config.json"] = b"[" + content[1:]
    with pytest.raises(Refusal, match=r"config.json has come with other bytes"):
        local_checkpoints(["org/target"], True)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", "a\\..\\outside", "a//b", "nul\0"])
def test_hostile_names_in_a_listing_are_refused(hub, tmp_path, name):
    hub.repositories["org/target"].files[name] = b"x"
    with pytest.raises(Refusal, match=r"org/target: lists a file .*, which would lie outside of its folder"):
        local_checkpoints(["org/target"], True)
    assert not hub.sent
    assert not (tmp_path / "cache").exists()


def test_hostile_digests_and_commits_are_refused(hub, monkeypatch):
    hub.repositories["org/target"].commit = "../../../evil"
    with pytest.raises(Refusal, match=r"answers for the commit '\.\./\.\./\.\./evil'"):
        local_checkpoints(["org/target"], True)
    monkeypatch.setattr("hub_server.digest_of", lambda content: "../../evil")
    with pytest.raises(Refusal, match=r"lists .* and digest='\.\./\.\./evil'"):
        local_checkpoints(["org/draft"], True)


@pytest.mark.parametrize(
    "name",
    ["../../no/such", "org/../name", "org/na..me", "org/name@../x", "org/name@", "org/a/b", "org/na--me", "-x/y",
     "org/name@a@b",
     "org/" + "x" * 100, "org/name\n", "örg/name", "https://huggingface.co/org/name", "org/.hidden", "nowhere"],
)  # fmt: skip
def test_names_that_the_hub_cannot_have_ask_nobody(hub, name):
    with pytest.raises(
        Refusal, match="is no folder, and the local hub cache has no such model: expected a checkpoint folder"
    ):
        local_checkpoints([name], True)
    assert not hub.requests


def test_an_index_that_names_a_file_elsewhere_is_refused(hub):
    files = hub.repositories["org/sharded"].files
    index = files["model.safetensors.index.json"].replace(b"model-00002-of-00003", b"../../00002")
    files["model.safetensors.index.json"] = index
    with pytest.raises(Refusal, match=r"names '\.\./\.\./00002.safetensors', which the repository does not list"):
        local_checkpoints(["org/sharded"], True)


def test_repositories_without_a_checkpoint_are_refused_before_a_download(hub, tmp_path):
    files = hub.repositories["org/target"].files
    safetensors = files.pop("model.safetensors")
    with pytest.raises(
        Refusal, match=r"pickled weights alone \(pytorch_model.bin\).* jspec-convert --allow-pickle --download"
    ):
        local_checkpoints(["org/target"], True)
    assert Path(local_checkpoints(["org/target"], True, allow_pickle=True)[0], "pytorch_model.bin").exists()
    hub.sent.clear()
    del files["pytorch_model.bin"]
    with pytest.raises(Refusal, match=r"holds neither model.safetensors nor"):
        local_checkpoints(["org/target"], True)
    del files["config.json"]
    files["model.safetensors"] = safetensors
    with pytest.raises(
        Refusal, match=r"holds no config.json, .*; org/target holds GGUF files: .* org/target:Q4_K_M; there are Q4_K_M"
    ):
        local_checkpoints(["org/target"], True)
    assert not hub.sent


def test_a_file_beyond_one_request_comes_through_the_library(hub, folders, monkeypatch):
    monkeypatch.setattr(transfer, "LARGEST_REQUEST", 1000)
    (folder,) = local_checkpoints(["org/target"], True)
    assert same(folder, folders / "target")
    hub.lies["model.safetensors"] = b"X" + hub.repositories["org/draft"].files["model.safetensors"][1:]
    with pytest.raises(Refusal, match="has come with other bytes"):
        local_checkpoints(["org/draft"], True)
    with pytest.raises(Refusal, match="has no such model"):
        local_checkpoints(["org/draft"], False)
