"""Public draft heads, most for mixtures of experts, as their publishers write them, on tiny targets of their families.

What it is that a head computes, tests/convert/test_convert_heads.py compares with the original code."""

import importlib.util
from pathlib import Path

import pytest
from greedy_texts import drafted
from public_heads import PUBLIC, ids
from tiers import in_tiers
from tiny import tiny_checkpoint
from tiny_heads import eagle3

import jspec
from convert.folders import read_draft_config
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.options import OpenSetting
from jspec.checkpoints.layouts.published import PUBLISHED

SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}
PROMPTS = [[5], [7, 8, 9] * 3]
LAYERS = {"num_hidden_layers": 8}


# The head of each way of writing, and of each family of targets.
DRAFTING = [PUBLIC[i] for i in (0, 1, 5, 9, 10, 11)]


@pytest.mark.parametrize("head", PUBLIC, ids=lambda head: head.names.split(",")[0])
def test_a_public_head_reads_the_layers_that_it_was_trained_on(tmp_path, head):
    target = Checkpoint.open(tiny_checkpoint(tmp_path / "target", head.target, **LAYERS)).target_config
    config = read_draft_config(head.write(tmp_path / "head", **head.keys), **head.said)
    assert config.resolved_aux_layers(target) == head.reads


@pytest.mark.parametrize("head", in_tiers(PUBLIC, test=DRAFTING), ids=lambda head: head.names.split(",")[0])
def test_a_public_head_drafts_for_its_target(tmp_path, head):
    """The greedy text stays that of the target."""
    target = tiny_checkpoint(tmp_path / "target", head.target, **LAYERS)
    folder = head.write(tmp_path / "head", **head.keys)
    llm = jspec.load(target, folder, num_draft_tokens=3, **head.said, **SMALL)
    drafted(llm, PROMPTS, most=16)


@pytest.mark.parametrize("head", [head for head in PUBLIC if head.said], ids=lambda head: head.names.split(",")[0])
def test_settings_missing_in_config_json_are_required(tmp_path, head):
    target = tiny_checkpoint(tmp_path / "target", head.target, **LAYERS)
    with pytest.raises(ValueError, match=next(iter(head.said))):
        jspec.load(target, head.write(tmp_path / "head", **head.keys), **SMALL)


@pytest.mark.parametrize(
    ("repository", "keys", "expected"),
    [
        ("nvidia/gpt-oss-120b-Eagle3-v3", ids(24, 30, 36), {"aux_layers": (24, 30, 36)}),
        ("lmsys/EAGLE3-gpt-oss-120b-bf16", ids(1, 17, 33), {"aux_layers": (2, 18, 34)}),
        ("lmsys/Qwen3-235B-A22B-EAGLE3", ids(1, 46, 90), {"aux_layers": (2, 47, 91)}),
        ("Dogacel/specdrift-gpt-oss-20b-eagle3", {"norm_output": True}, {"norm_output": True}),
        ("Dogacel/specdrift-gpt-oss-120b-eagle3", {"norm_output": False}, {"norm_output": False}),
    ],
)
def test_settings_of_a_published_head_need_not_be_given(tmp_path, repository, keys, expected):
    organisation, name = repository.split("/")
    assert repository in PUBLISHED
    for place in (name, f"{organisation}/{name}", f"models--{organisation}--{name}/snapshots/0123abcd"):
        checkpoint = Checkpoint.open(eagle3(tmp_path / place, **keys))
        assert {field: getattr(checkpoint.config, field) for field in expected} == expected
        [note] = [note for note in checkpoint.hugging_face.layout.notes if repository in note]
        assert PUBLISHED[repository].source in note


def test_a_different_head_of_a_published_name_is_not_mistaken_for_it(tmp_path):
    for place, keys in (
        ("gpt-oss-120b-Eagle3-v3", ids(1, 17, 32, norm_before_fc=True)),
        ("my-gpt-oss-120b-Eagle3-v3", ids(24, 30, 36, norm_before_fc=True)),
        ("gpt-oss-120b-Eagle3-v3/checkpoint", ids(24, 30, 36, norm_before_fc=True)),
    ):
        with pytest.raises(OpenSetting, match="say which: --aux-convention"):
            read_draft_config(eagle3(tmp_path / place, **keys))
    given = read_draft_config(
        eagle3(tmp_path / "gpt-oss-120b-Eagle3-v3", **ids(24, 30, 36)), aux_convention="output_of"
    )
    assert given.aux_layers == (25, 31, 37)


def test_every_published_head_is_tried():
    tried = test_settings_of_a_published_head_need_not_be_given.pytestmark[0].args[1]
    assert {repository for repository, *_ in tried} == {name for name, head in PUBLISHED.items() if not head.disputed}


def test_the_page_says_what_jspec_makes_of_them(capsys, monkeypatch, tmp_path):
    pytest.importorskip("torch")  # which writes assistants and pickles
    file = Path(__file__).parents[2] / "docs" / "published_heads.py"
    spec = importlib.util.spec_from_file_location("published_heads", file)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--check"]) == 0
    changed = tmp_path / "page.md"
    changed.write_text(script.PAGE.read_text().replace("| read |", "| refused |", 1))
    monkeypatch.setattr(script, "PAGE", changed)
    assert script.main(["--check"]) == 1
    assert "run docs/published_heads.py" in capsys.readouterr().err
