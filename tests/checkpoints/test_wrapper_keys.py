"""No key of a multimodal checkpoint's config.json that changes what transformers computes of text is ignored."""

import copy
import json

import pytest
from other_values import other_values, read
from wrapper_checkpoints import WRAPPED, save_wrapper

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IGNORED = ("vision_config", "architectures")  # other parts, and the class itself


def logits(raw: dict, name: str, weights=None):
    """What transformers computes of a text by a config.json; None if it refuses it, or needs other weights."""
    prefix = WRAPPED[name][0]
    try:
        config = getattr(transformers, f"{prefix}Config").from_dict(copy.deepcopy(raw))
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            return model(input_ids=torch.arange(3, 19)[None]).logits
    except Exception:
        return None


@pytest.mark.parametrize("name", WRAPPED)
def test_a_value_that_changes_what_transformers_computes_is_not_ignored(tmp_path, name):
    weights = save_wrapper(tmp_path, name).state_dict()
    base = json.loads((tmp_path / "config.json").read_text())
    expected, (config, unread) = logits(base, name, weights), read(tmp_path, base)
    assert expected is not None
    assert config is not None
    assert unread == []
    outer = [({**base, key: other}, key) for key in base if key not in IGNORED for other in other_values(base[key])]
    text = base["text_config"]
    inner = [
        ({**base, "text_config": {**text, key: other}}, key)
        for key, value in text.items()
        for other in other_values(value)
    ]
    ignored, changed = [], 0
    for raw, key in (*(one for one in outer if one[1] != "text_config"), *inner):
        found = logits(raw, name, weights)
        if found is None or torch.equal(found, expected):
            continue
        changed += 1
        now, warned = read(tmp_path, raw)
        if now == config and key not in warned and f"text_config.{key}" not in warned:
            ignored.append(key)
    assert changed >= 2, "no value was tried that changes anything"
    assert ignored == []
