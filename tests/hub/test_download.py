"""Models by name: what is downloaded, after which consent, and what is said where it cannot be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Hub, hub_server
from tiny import tiny_checkpoint, tiny_tokenizer

import jspec
from convert.cli import main as convert_main
from jspec.checkpoints.files.refusal import Refusal
from jspec.cli import main
from jspec.hub import consent, transfer
from jspec.hub.folders import local_checkpoints

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
UNREAD = (
    "README.md",
    "model.Q4_K_M.gguf",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "picture.png",
    "modeling_x.py",
)
UNREAD += ("original/params.json", "onnx/model.onnx", ".gitattributes")


def checkpoint(folder: Path, **settings) -> Path:
    """A small checkpoint, and beside it what repositories have that jspec does not read."""
    tiny_checkpoint(folder, bos_token_id=0, eos_token_id=1, **SIZES, **settings)
    tiny_tokenizer(folder)
    for name in UNREAD:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"unread" * 1000)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    checkpoint(root / "target")
    checkpoint(root / "draft", seed=1)
    checkpoint(root / "sharded", shards=3)
    return root


@pytest.fixture
def hub(tmp_path, monkeypatch, folders):
    """A stand-in that huggingface_hub takes for the hub, with two models, and an empty local cache."""
    with hub_server() as hub:
        settings = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False}
        settings["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for constant, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{constant}", value)
        monkeypatch.setattr(
            "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000
        )  # so much of a cut file is lost at most
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        for name in ("target", "draft", "sharded"):
            hub.host(f"org/{name}", folders / name)
        yield hub


class Terminal:
    """A terminal at which somebody answers."""

    closed = False

    def __init__(self, answer: str):
        self._answer, self.written = answer, ""

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._answer

    def write(self, text: str):
        self.written += text

    def flush(self):
        pass


def at_terminal(monkeypatch, answer: str) -> Terminal:
    terminal = Terminal(answer)
    monkeypatch.setattr(consent.sys, "stdin", terminal)
    monkeypatch.setattr(consent.sys, "stderr", terminal)
    return terminal


def files_sent(hub: Hub) -> set[str]:
    return {name for name, _, size in hub.sent if size}


def same(folder: str, source: Path) -> bool:
    """Whether every file of a downloaded folder is the source's."""
    return all(path.read_bytes() == (source / path.name).read_bytes() for path in Path(folder).iterdir())


def test_only_what_is_read_is_downloaded(hub, folders, capsys):
    (folder,) = local_checkpoints(["org/target"], True)
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in Path(folder).iterdir()} == names == files_sent(hub)
    assert same(folder, folders / "target")
    err = capsys.readouterr().err
    size = sum((folders / "target" / name).stat().st_size for name in names)
    assert (
        f"downloading org/target (commit {hub.repositories['org/target'].commit[:8]}): 4 files, {consent.shown(size)}"
        in err
    )


def test_shards_come_as_the_index_names_them(hub, folders):
    hub.repositories["org/sharded"].files["another.safetensors"] = b"of something else"
    (folder,) = local_checkpoints(["org/sharded"], True)
    assert same(folder, folders / "sharded")
    assert len(list(Path(folder).glob("*.safetensors"))) == 3
    assert "another.safetensors" not in files_sent(hub)


def test_load_takes_names_and_their_text_is_that_of_the_folders(hub, folders):
    options = {"max_len": 64, "max_batch": 1, "num_draft_tokens": 2}
    llm = jspec.load("org/target", "org/draft@main", download=True, **options)
    own = jspec.load(folders / "target", folders / "draft", **options)
    texts = [model.generate("import os", temperature=0, max_tokens=8).token_ids for model in (llm, own)]
    assert texts[0] == texts[1]
    hub.down = True  # and from now on the local cache has them
    assert jspec.load("org/target", "org/draft", **options).method == "draft_model"


def test_nothing_is_downloaded_without_consent(hub, folders):
    with pytest.raises(
        ValueError, match=r"'org/target' is no folder, .* no such model: .* --download .* from the hub \(\d+"
    ):
        jspec.load("org/target")
    with pytest.raises(ValueError, match="org/draft"):
        jspec.load(folders / "target", "org/draft", download=False)
    assert not hub.sent


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "perhaps\n"])
def test_a_question_that_is_not_answered_with_yes_is_a_no(hub, monkeypatch, answer):
    terminal = at_terminal(monkeypatch, answer)
    with pytest.raises(Refusal, match="org/target and org/draft: not downloaded, as you wished"):
        local_checkpoints(["org/target", "org/draft"])
    assert not hub.sent
    assert terminal.written.count("? [y/N]") == 1


def test_one_question_has_the_sizes_of_both(hub, folders, monkeypatch):
    terminal = at_terminal(monkeypatch, "y\n")
    found = local_checkpoints(["org/target", str(folders / "sharded"), "org/draft"])
    assert same(found[0], folders / "target")
    assert found[1] == str(folders / "sharded")
    assert same(found[2], folders / "draft")
    assert terminal.written.count("? [y/N]") == 1
    lines = terminal.written.splitlines()
    assert [line.split(" (commit")[0] for line in lines[:2]] == ["org/target", "org/draft"]
    assert all(line.endswith(("kB", "MB")) for line in lines[:2])
    assert f"from {hub.url} to " in lines[2]
    local_checkpoints(["org/target", "org/draft"])
    assert terminal.written.count("? [y/N]") == 1  # there is nothing to ask any more


def test_a_cut_connection_goes_on_within_a_run(hub, folders):
    whole = len(hub.repositories["org/target"].files["model.safetensors"])
    hub.cut["model.safetensors"] = 1000
    (folder,) = local_checkpoints(["org/target"], True)
    assert same(folder, folders / "target")
    assert [(f, first) for f, first, _ in hub.sent if f == "model.safetensors"] == [
        ("model.safetensors", 0),
        ("model.safetensors", 1000),
    ]
    assert hub.bytes_of("model.safetensors") == whole


def test_a_second_run_goes_on_where_the_first_ended(hub, folders, capsys):
    whole = len(hub.repositories["org/target"].files["model.safetensors"])
    hub.cut["model.safetensors"], hub.down_after_cut = 5000, True
    message = r"org/target: the download of model.safetensors broke off after 5,000 of .* run the command again"
    with pytest.raises(Refusal, match=message):
        local_checkpoints(["org/target"], True)
    hub.down = False
    with pytest.raises(
        Refusal, match=rf"no such model: .* --download .* from the hub \({consent.shown(whole - 5000)}\)"
    ):
        local_checkpoints(["org/target"], False)
    capsys.readouterr()
    (folder,) = local_checkpoints(["org/target"], True)
    assert same(folder, folders / "target")
    assert hub.bytes_of("model.safetensors") == whole
    assert hub.bytes_of("config.json") == len(hub.repositories["org/target"].files["config.json"])
    assert "are here already" in capsys.readouterr().err
    assert not list(Path(folder).parents[1].rglob("*.incomplete"))


def test_a_new_commit_fetches_what_changed(hub, folders):
    (old,) = local_checkpoints(["org/target"], True)
    hosted = hub.repositories["org/target"]
    hosted.files["generation_config.json"], hosted.commit = b'{"top_k": 7}', "b" * 40
    assert local_checkpoints(["org/target"], False) == [old]
    hub.sent.clear()
    (new,) = local_checkpoints(["org/target"], True)
    assert Path(new).name == "b" * 40
    assert files_sent(hub) == {"generation_config.json"}
    assert local_checkpoints(["org/target@" + "b" * 40], False) == [new]
    assert local_checkpoints([f"org/target@{Path(old).name}"], False) == [old]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("org/absent", None, r"has no such model repository \(HTTP 40[14]\), or a private one; correct the name, or set HF_TOKEN"),
        ("org/secret", {"status": (401, "RepoNotFound")}, r"no such model repository \(HTTP 401\)"),
        ("org/gated", {"status": (401, "GatedRepo")}, r"gated \(HTTP 401\); accept its conditions at http.*/org/gated, then set HF_TOKEN"),
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
    with pytest.raises(Refusal, match="fetches it from the hub$"):  # without a size
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
    with pytest.raises(Refusal, match="org/target: model.safetensors has come with other bytes than the hub lists"):
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
    with pytest.raises(Refusal, match="org/target: lists a file .*, which would lie outside of its folder"):
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
    ["../../no/such", "org/../name", "org/na..me", "org/name@../x", "org/name@", "org/a/b", "org/na--me", "-x/y", "org/name@a@b",
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
    with pytest.raises(Refusal, match="holds neither model.safetensors nor"):
        local_checkpoints(["org/target"], True)
    del files["config.json"]
    files["model.safetensors"] = safetensors
    with pytest.raises(Refusal, match="holds no config.json, .* no GGUF"):
        local_checkpoints(["org/target"], True)
    assert not hub.sent


def test_converted_folders_come_with_all_that_their_manifest_names(hub, folders, tmp_path):
    assert convert_main([str(folders / "target"), str(tmp_path / "out")]) == 0
    hub.host("org/converted", tmp_path / "out")
    llm = jspec.load("org/converted", download=True, check_files=True, max_len=32, max_batch=1)
    assert len(llm.generate("x", max_tokens=2, ignore_eos=True).token_ids) == 2


def test_commands_take_names(hub, folders, tmp_path, capsys):
    run = ["generate", "org/target", "import os", "--max-tokens", "4", "--max-len", "64"]
    assert main(run) == 2
    assert "jspec generate: 'org/target' is no folder" in capsys.readouterr().err
    assert main([*run, "--download", "--draft", "org/draft"]) == 0
    assert "downloading org/draft" in capsys.readouterr().err
    assert main(run) == 0
    assert convert_main(["org/sharded", str(tmp_path / "out"), "--dry-run"]) == 2
    assert "--download" in capsys.readouterr().err
    assert convert_main(["org/sharded", str(tmp_path / "out"), "--download", "--dtype", "bfloat16"]) == 0
    assert main(["serve", "org/absent", "--download"]) == 2
    assert "jspec serve: org/absent: " in capsys.readouterr().err


def test_a_draft_head_alone_brings_its_target(hub, folders, tmp_path):
    from tiny_heads import speculators

    tiny_checkpoint(tmp_path / "target")
    hub.host("org/verifier", tmp_path / "target")
    head = speculators(tmp_path / "head", verifier="org/verifier")
    hub.host("org/head", head)
    with pytest.raises(
        ValueError, match=r"is a draft head for another checkpoint: 'org/verifier' is no folder, .* --download"
    ):
        jspec.load(head, download=False, max_len=32, max_batch=1)
    assert jspec.load("org/head", download=True, max_len=32, max_batch=1).method == "eagle3"


def test_the_environment_names_hub_and_cache(hub, tmp_path):
    """In a process of its own, because huggingface_hub reads its variables when it is imported."""
    code = (
        "import sys; from jspec.hub.folders import local_checkpoints; print(*local_checkpoints(['org/target'], True))"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    environment |= {"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(str(tmp_path / "home" / "hub" / "models--org--target" / "snapshots"))
    assert "hf_secret" not in run.stdout + run.stderr


def test_a_file_beyond_one_request_comes_through_the_library(hub, folders, monkeypatch):
    monkeypatch.setattr(transfer, "LARGEST_REQUEST", 1000)
    (folder,) = local_checkpoints(["org/target"], True)
    assert same(folder, folders / "target")
    hub.lies["model.safetensors"] = b"X" + hub.repositories["org/draft"].files["model.safetensors"][1:]
    with pytest.raises(Refusal, match="has come with other bytes"):
        local_checkpoints(["org/draft"], True)
    with pytest.raises(Refusal, match="has no such model"):
        local_checkpoints(["org/draft"], False)
