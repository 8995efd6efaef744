"""Models by name: what is downloaded, after which consent, and how a download goes on."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import killed_at_the_end
from hub_server import Hub, digest_of, same
from tiny import tiny_checkpoint
from tiny_heads import speculators

import jspec
from convert.cli import main as convert_main
from jspec.checkpoints.files.refusal import Refusal
from jspec.cli import main
from jspec.hub import consent
from jspec.hub.folders import local_checkpoints

ROOT = Path(__file__).parents[2]


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


def test_load_takes_names(hub):
    options = {"max_len": 64, "max_batch": 1, "num_draft_tokens": 2}
    assert jspec.load("org/target", "org/draft@main", download=True, **options).method == "draft_model"
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


def test_content_that_several_files_and_downloads_want_comes_once(hub, folders):
    """As many of them at a time as threads fetch, and two downloads beside each other, which are as two processes."""
    hosted, content = hub.repositories["org/target"], bytes(3_000_000)
    hosted.files |= {
        "tokenizer_config.json": content,
        "generation_config.json": content,
        "chat_template.jinja": content,
    }
    with ThreadPoolExecutor(3) as pool:
        found = {folder for [folder] in pool.map(lambda _: local_checkpoints(["org/target"], True), range(3))}
    (folder,) = found
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        assert (Path(folder) / name).read_bytes() == content
    assert sum(hub.bytes_of(name) for name in hosted.files if hosted.files[name] == content) == len(content)


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


def test_converted_folders_come_with_all_that_their_manifest_names(hub, folders, tmp_path):
    assert convert_main([str(folders / "target"), str(tmp_path / "out")]) == 0
    hub.host("org/converted", tmp_path / "out")
    llm = jspec.load("org/converted", download=True, check_files=True, max_len=32, max_batch=1)
    assert len(llm.generate("x", max_tokens=2, ignore_eos=True).token_ids) == 2


def test_commands_take_names(hub, folders, tmp_path, capsys):
    run = ["generate", "org/target", "import os", "--max-tokens", "4", "--max-len", "64"]
    assert main(run) == 2
    assert "jspec generate: 'org/target' is no folder" in capsys.readouterr().err
    assert main([*run, "--download"]) == 0
    assert "downloading org/target" in capsys.readouterr().err
    assert convert_main(["org/sharded", str(tmp_path / "out"), "--dry-run"]) == 2
    assert "--download" in capsys.readouterr().err
    assert convert_main(["org/sharded", str(tmp_path / "out"), "--download", "--dtype", "bfloat16"]) == 0
    assert main(["serve", "org/absent", "--download"]) == 2
    assert "jspec serve: org/absent: " in capsys.readouterr().err


def test_a_draft_head_alone_brings_its_target(hub, folders, tmp_path):
    tiny_checkpoint(tmp_path / "target", num_hidden_layers=6)
    hub.host("org/verifier", tmp_path / "target")
    head = speculators(tmp_path / "head", verifier="org/verifier")
    hub.host("org/head", head)
    with pytest.raises(
        ValueError, match=r"is a draft head for another checkpoint: 'org/verifier' is no folder, .* --download"
    ):
        jspec.load(head, download=False, max_len=32, max_batch=1)
    assert jspec.load("org/head", download=True, num_draft_tokens=3, max_len=32, max_batch=1).method == "eagle3"


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """The variables of a process of its own, because huggingface_hub reads them when it is imported."""
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


CODE = """
    import sys
    import huggingface_hub.constants
    from jspec.hub.folders import local_checkpoints
    huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1000
    print(*local_checkpoints(['org/target'], True))
"""


def test_the_environment_names_hub_cache_and_token(hub, tmp_path):
    hub.elsewhere = True
    command = [sys.executable, "-c", textwrap.dedent(CODE)]
    run = subprocess.run(
        command, env=environment(hub, tmp_path / "home"), capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.startswith(str(tmp_path / "home" / "hub" / "models--org--target" / "snapshots"))
    assert "hf_secret" not in run.stdout + run.stderr
    tokens = dict(hub.tokens)
    assert tokens["127.0.0.1"] == "Bearer hf_secret"
    assert tokens["localhost"] is None  # where a redirect leads gets no token


def test_ctrl_c_ends_a_download_at_once_and_keeps_what_has_come(hub, tmp_path):
    """Even where the network is silent, for which huggingface_hub waits for a minute in all."""
    content = hub.repositories["org/target"].files["model.safetensors"]
    hub.hold["model.safetensors"] = 50_000
    command = [sys.executable, "-c", textwrap.dedent(CODE)]
    variables = environment(hub, tmp_path / "home")
    with (
        subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as process,
        killed_at_the_end(process),
    ):
        blobs = tmp_path / "home" / "hub" / "models--org--target" / "blobs"
        part = blobs / f"{digest_of(content)}.jspec.incomplete"
        deadline = time.monotonic() + 60
        while not part.exists() or not part.stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
        assert time.monotonic() - start < 5
    hub.released.set()
    kept = part.stat().st_size
    assert 0 < kept <= 50_000
    hub.sent.clear()
    subprocess.run(command, env=variables, capture_output=True, check=True, timeout=60)
    assert [(first, size) for name, first, size in hub.sent if name == "model.safetensors"] == [
        (kept, len(content) - kept)
    ]
