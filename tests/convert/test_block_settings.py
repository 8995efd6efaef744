"""Settings of block drafters that change what they compute: honoured under every name and in every place, or refused."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from heads import VARIANTS, random_head
from safetensors.numpy import save_file

from convert import load_draft
from convert.folders import read_draft_config
from jspec.checkpoints.export import export_draft
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.layouts.block_settings import _FIXED, ANCHOR_KEYS, CAUSAL_KEYS
from jspec.config.heads import BlockConfig
from jspec.models import flat_params

PLAIN = dataclasses.replace(VARIANTS["dflash"].layers, windows=())
HEADS = {
    "z-lab": ("native", dataclasses.replace(VARIANTS["dflash"], layers=PLAIN, causal=(False, False))),
    "DeepSpec": ("native", dataclasses.replace(VARIANTS["dspark-vanilla"], layers=PLAIN, anchor_first=True)),
    "DeepSpec's DFlash": ("native", dataclasses.replace(VARIANTS["dflash-short"], layers=PLAIN)),
    "speculators": ("speculators", VARIANTS["dflash-anchored"]),
}
PLACES = ("top", "dflash_config")


def written(folder: Path, name: str) -> Path:
    layout, config = HEADS[name]
    return exported(folder, config, layout)


def exported(folder: Path, config: BlockConfig, layout: str) -> Path:
    params = {name: np.asarray(array) for name, array in flat_params(random_head(config)).items()}
    export_draft(folder, config, params, target_name="the/target", dtype="float32", layout=layout)
    return folder


def said(folder: Path, *settings: tuple[str, str, object]) -> Path:
    """The folder, after ``settings``, (place, key, value) each, have taken the place of what it said of anchors."""
    file = folder / "config.json"
    fields = {key: value for key, value in json.loads(file.read_text()).items() if key not in ANCHOR_KEYS}
    inner = dict(fields.pop("dflash_config", {}))
    for place, key, value in settings:
        (fields if place == "top" else inner)[key] = value
    file.write_text(json.dumps({**fields, **({"dflash_config": inner} if inner else {})}))
    return folder


def shown(place: str, key: str, value) -> str:
    return f"{'' if place == 'top' else place + '.'}{key}={value}"


@pytest.mark.parametrize("name", HEADS)
def test_each_name_says_which_slot_drafts_first(tmp_path, name):
    """Query zero is the anchor's slot. If it predicts the next token, the block makes as many drafts as it has slots."""
    folder, B = written(tmp_path / "head", name), HEADS[name][1].block_size
    for place, key, value in itertools.product(PLACES, ANCHOR_KEYS, (True, False)):
        config = read_draft_config(said(folder, (place, key, value)))
        assert (config.anchor_first, config.max_drafts) == (value, B if value else B - 1)
        folder = said(folder, (place, key, None))  # for the next


def test_class_or_number_of_drafts_decides_by_default(tmp_path):
    for i, name in enumerate(HEADS):
        folder = said(written(tmp_path / str(i), name))
        assert read_draft_config(folder) == HEADS[name][1]
    spec = said(written(tmp_path / "specforge", "z-lab"), ("dflash_config", "projector_type", "dspark"))
    assert read_draft_config(spec).anchor_first


@pytest.mark.parametrize("name", HEADS)
def test_two_names_that_differ_are_refused(tmp_path, name):
    folder = written(tmp_path / "head", name)
    for one, two in itertools.permutations(itertools.product(PLACES, ANCHOR_KEYS), 2):
        both = said(folder, (*one, True), (*two, False))
        with pytest.raises(Refusal) as refusal:
            read_draft_config(both)
        assert "contradict each other" in str(refusal.value)
        assert all(
            part in str(refusal.value) for part in (shown(*one, True), shown(*two, False), "/head/config.json: ")
        )
        assert read_draft_config(said(folder, (*one, True), (*two, True))).anchor_first
        said(folder, *((*place, None) for place in (one, two)))


@pytest.mark.parametrize("value", [1, 0, "true", "false", [True], {}])
def test_other_values_than_booleans_are_refused(tmp_path, value):
    folder = written(tmp_path / "head", "z-lab")
    for place, key in itertools.product(PLACES, (*ANCHOR_KEYS, *CAUSAL_KEYS, "shift_label", "use_swa")):
        with pytest.raises(Refusal) as refusal:
            read_draft_config(said(folder, (place, key, value)))
        assert f"{shown(place, key, repr(value))}: expected true or false" in str(refusal.value)
        said(folder, (place, key, None))


@pytest.mark.parametrize("anchor_first", [True, False])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *itertools.product(("dflash", "dflash-wide", "dspark-vanilla", "dspark"), ("native", "speculators")),
        ("jetspec", "native"),  # causal layers without windows
    ],
)
def test_settings_that_are_exported_are_read_again(tmp_path, name, anchor_first, layout):
    config = dataclasses.replace(VARIANTS[name], anchor_first=anchor_first)
    if layout == "speculators":
        config = dataclasses.replace(config, windows_from_anchor=any(config.causal))
    elif not any(config.causal):
        config = dataclasses.replace(config, layers=PLAIN)
    found, _ = load_draft(exported(tmp_path / "head", config, layout))
    assert found == config


@pytest.mark.parametrize("place", PLACES)
def test_config_json_may_say_where_windows_begin(tmp_path, place):
    """Of heads whose trainer no file names, and against the rule of a layout; it is refused where no layer has a window."""
    key, causal, both_ways = "windows_from_anchor", VARIANTS["dflash"], ("top", "is_causal", False)

    def rules(folder, *more):
        found = read_draft_config(said(folder, *more))
        return found.windows_from_anchor, found.windows_by_slot

    folder = exported(tmp_path / "native", causal, "native")
    assert rules(folder) == (False, False)
    assert rules(folder, (place, key, True)) == (True, False)
    assert rules(folder, (place, key, False)) == (False, False)
    assert rules(folder, both_ways) == (False, True)
    assert rules(folder, (place, key, True)) == (False, False)
    folder = exported(tmp_path / "head", VARIANTS["dflash-anchored"], "speculators")
    assert rules(folder, (place, key, False)) == (False, False)
    folder = written(tmp_path / "none", "z-lab")
    for value, expected in ((True, "nothing, because no layer has a window"), (1, "true or false")):
        with pytest.raises(Refusal, match=f"{key}={value}: expected {expected}"):
            read_draft_config(said(folder, (place, key, value)))


@pytest.mark.parametrize("place", PLACES)
def test_use_swa_gives_all_layers_a_window(tmp_path, place):
    """Whose size is that of dflash_config before that at the top."""
    folder = said(written(tmp_path / "head", "z-lab"), (place, "use_swa", True), ("top", "sliding_window", 7))
    found = read_draft_config(folder)
    assert (found.layers.windows, found.causal, found.windows_by_slot) == ((7, 7), (False, False), True)
    assert read_draft_config(said(folder, (place, "swa_window_size", 6))).layers.windows == (6, 6)
    with pytest.raises(Refusal, match=r"windows_by_slot=True: expected False, unless layers .* of at least 5"):
        read_draft_config(said(folder, (place, "swa_window_size", 4)))


def test_causal_names_that_differ_are_refused(tmp_path):
    folder = written(tmp_path / "head", "z-lab")
    with pytest.raises(Refusal, match=r"dflash_config\.causal_head=True and is_causal=False contradict each other"):
        read_draft_config(said(folder, ("dflash_config", "causal_head", True), ("top", "is_causal", False)))
    assert read_draft_config(said(folder, ("top", "is_causal", True))).causal == (True, True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["z-lab", "DeepSpec", "speculators"])
def test_settings_that_are_not_supported_are_refused(tmp_path, name, place):
    folder = written(tmp_path / "head", name)
    cases = {key: (5, "null" if only is None else f"{only!r}, the one value") for key, only in _FIXED}
    cases |= {
        "projector_type": ("eagle", "one of dflash, dflash2, dspark, domino, lilicorr, because no other"),
        "shift_label": (not HEADS[name][1].anchor_first, "because the anchor's slot "),
    }
    if name != "speculators":
        cases["use_swa"] = True, "false, because no layer has a window; else say how many tokens in sliding_window"
    else:
        cases["swa_window_size"] = 8, "9, the sliding_window of the layers"
    for key, (value, expected) in cases.items():
        before = json.loads((folder / "config.json").read_text())
        with pytest.raises(Refusal) as refusal:
            read_draft_config(said(folder, (place, key, value), ("top", ANCHOR_KEYS[0], HEADS[name][1].anchor_first)))
        assert f"{shown(place, key, repr(value))}: expected {expected}" in str(refusal.value) or (
            key == "shift_label" and expected in str(refusal.value) and shown(place, key, value) in str(refusal.value)
        )
        (folder / "config.json").write_text(json.dumps(before))


def test_redundant_settings_are_accepted(tmp_path):
    """They do not have to be left out. Windows may be stated twice."""
    folder = written(tmp_path / "head", "speculators")
    same = [("dflash_config", key, only) for key, only in _FIXED]
    windows = [("dflash_config", "use_swa", True), ("dflash_config", "swa_window_size", 9)]
    more = [("top", "shift_label", False), ("top", "projector_type", "dflash")]
    assert read_draft_config(said(folder, *same, *windows, *more)) == HEADS["speculators"][1]


@pytest.mark.parametrize("name", ["z-lab", "speculators"])
def test_a_separate_mask_embedding_is_refused(tmp_path, name):
    folder = written(tmp_path / "head", name)
    save_file({"embedding": np.zeros(16, np.float32)}, folder / "mask_embedding.pt")
    with pytest.raises(
        Refusal, match=r"head/mask_embedding\.pt: an embedding of mask slots in a file of its own is not"
    ):
        read_draft_config(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_target_layers": 2},
            "target_layer_ids=[-1, 1, 2]: expected layer ids of at most 1, because num_target_layers=2",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "target_layer_ids=[-1, 1, 2], the outputs of these layers, and eagle_aux_hidden_state_layer_ids=[1, 2, 3], read "
            "as input_of or output_of, name different hidden states; leave out the list that is wrong",
        ),
    ],
)
def test_contradictory_layer_ids_are_refused(tmp_path, settings, words):
    folder = written(tmp_path / "head", "z-lab")
    same = [("top", "eagle_aux_hidden_state_layer_ids", [0, 2, 3]), ("top", "num_target_layers", 3)]
    assert read_draft_config(said(folder, *same)) == HEADS["z-lab"][1]
    with pytest.raises(Refusal) as refusal:
        read_draft_config(said(folder, *(("top", key, value) for key, value in settings.items())))
    assert words in str(refusal.value)
