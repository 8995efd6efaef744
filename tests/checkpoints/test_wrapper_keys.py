"""No key of a multimodal checkpoint's config.json that changes what transformers computes of text is ignored."""

import copy
import json

import pytest
from other_values import assert_none_is_ignored, other_values
from wrapper_checkpoints import WRAPPED, save_wrapper

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IGNORED = ("vision_config", "architectures", "text_config")  # other parts, the class, and what is asked key by key


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
    text, outer = base["text_config"], [key for key in base if key not in IGNORED]
    changes = [(key, {**base, key: other}) for key in outer for other in other_values(base[key])]
    inner = ((key, {**text, key: other}) for key in text for other in other_values(text[key]))
    changes += [(key, {**base, "text_config": changed}) for key, changed in inner]
    assert_none_is_ignored(tmp_path, base, changes, lambda raw: logits(raw, name, weights), least=2)
