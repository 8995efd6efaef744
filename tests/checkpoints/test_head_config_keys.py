"""No key of a draft head is read without effect: another value changes what is read, is refused, or is named."""

import json
import warnings

import pytest
from other_values import other_values
from tiny_heads import deepspec_eagle3, eagle, eagle3, medusa, mlp_speculator, p_eagle, pard, speculators

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.huggingface.unread_keys import HARMLESS, HARMLESS_IN_ROPES

HEADS = {
    head.__name__: head for head in (eagle, eagle3, deepspec_eagle3, p_eagle, speculators, pard, mlp_speculator, medusa)
}
# Keys that are read and whose other values change nothing, by their paths.
WITHOUT_EFFECT = (
    "num_target_layers",  # only bounds the layer ids
    "medusa_num_heads",  # counted from the tensors, since published configs state other numbers
    "speculators_config.algorithm",  # repeats speculators_model_type
    "speculators_config.default_proposal_method",  # how others verify, as do those below; jspec is lossless
    "speculators_config.proposal_methods",
)


def read(folder, raw):
    """What is read of a head with this config.json, or why it is refused; and the warnings."""
    (folder / "config.json").write_text(json.dumps(raw))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            return Checkpoint.open(folder).config, [str(warning.message) for warning in warned]
        except ValueError as error:
            return str(error), []


def mutations(raw, path=()):
    """(path of a key, another value, config.json with it) for every key, those of objects too."""
    for key, value in raw.items():
        if isinstance(value, dict):
            for inner, other, changed in mutations(value, (*path, key)):
                yield inner, other, {**raw, key: changed}
            continue
        for other in other_values(value) if not isinstance(value, str) else [f"{value}x"]:
            yield (*path, key), other, {**raw, key: other}


@pytest.mark.parametrize("name", HEADS)
def test_a_key_of_a_head_with_another_value_changes_the_config(tmp_path, name):
    folder = HEADS[name](tmp_path / "head")
    raw = json.loads((folder / "config.json").read_text())
    base, warned = read(folder, raw)
    assert not isinstance(base, str)
    ignored, changed = [], 0
    for path, other, config in mutations(raw):
        found, said = read(folder, config)
        if found != base or said != warned:
            changed += 1
        elif path[-1] not in HARMLESS | HARMLESS_IN_ROPES and ".".join(path) not in WITHOUT_EFFECT:
            ignored.append((".".join(path), other))
    assert changed >= 3
    assert ignored == []
