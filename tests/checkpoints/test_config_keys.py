"""No key of config.json that changes what transformers computes is ignored, and keys that nothing reads are named."""

import copy
import json
import warnings

import pytest
from other_values import assert_none_is_ignored, other_values, read
from parity_cases import CASES, DELTA_EXPERTS, DELTA_NETS, GEMMA4_EXPERTS, GEMMA4_SMALL, GROWING, SIZES
from tiny import ARCHITECTURES, tiny_checkpoint, tiny_config
from tiny_heads import eagle3

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import decoder_config, read_fields
from jspec.checkpoints.huggingface.families import FAMILIES, MODEL_TYPES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")

# Keys that no class of FAMILIES writes, and that shared code of transformers reads from any config.
SHARED = {
    "is_causal": False,
    "attention_chunk_size": 3,
    "sliding_window": 3,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"rms_norm_eps": 0.5}},
    "use_bidirectional_attention": True,
}
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
# The first case of each family that the logits of transformers are compared in, and what makes more of its keys matter.
SMALL = {f"{family}ForCausalLM": settings for family, settings in reversed(CASES.values())}
SMALL |= {
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo3ForCausalLM": {"sliding_window": 7, "num_hidden_layers": 5},
    "Ministral3ForCausalLM": {"rope_parameters": GROWING},
    "Gemma4ForCausalLM": {**GEMMA4_SMALL, **GEMMA4_EXPERTS},
    **{f"{family}ForCausalLM": {**DELTA_EXPERTS, **TWO_LAYERS} for family in ("Qwen3_5Moe", "Qwen3Next")},
    "Qwen3_5ForCausalLM": {**DELTA_NETS, **TWO_LAYERS},
}
OF_TEXT = ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")  # with a config class for their text model


NOT_OF_OPT = ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps")


def config_class(architecture: str):
    """The class of transformers that reads config.json."""
    name = architecture.removesuffix("ForCausalLM")
    return getattr(transformers, f"{name}TextConfig" if name in OF_TEXT else f"{name}Config")


def base_config(architecture: str) -> dict:
    """config.json of a tiny model as transformers writes it, with every key of its class."""
    sizes = {**SIZES, **SMALL.get(architecture, {})}
    if architecture == "OPTForCausalLM":
        sizes = {key: sizes[key] for key in sizes if key not in NOT_OF_OPT}
    raw = config_class(architecture)(**copy.deepcopy(sizes)).to_dict()
    return {**json.loads(json.dumps(raw)), "architectures": [architecture]}


def logits(raw: dict, architecture: str, weights=None):
    """What transformers computes by a config.json, and its weights; None if it refuses it, or needs other weights."""
    raw = copy.deepcopy(raw)
    try:
        config = config_class(architecture).from_dict(raw)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = getattr(transformers, architecture)(config).eval()
        if weights is None:
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.1)
        else:
            model.load_state_dict(weights)
        with torch.no_grad():
            return model(torch.arange(3, 19)[None]).logits, model.state_dict()
    except Exception:
        return None, None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_value_that_changes_what_transformers_computes_is_not_ignored(tmp_path, architecture):
    base = base_config(architecture)
    _, weights = logits(base, architecture)
    others = {key: other_values(base[key]) if key in base else [value] for key, value in {**SHARED, **base}.items()}
    changes = ((key, {**base, key: other}) for key, values in others.items() for other in values)
    assert_none_is_ignored(tmp_path, base, changes, lambda raw: logits(raw, architecture, weights)[0], least=3)


def test_a_key_that_nothing_reads_is_named(tmp_path):
    tiny_checkpoint(
        tmp_path / "target", new_scale=2.0, rope_scaling={"rope_type": "linear", "factor": 2.0, "section": [1]}
    )
    with pytest.warns(UserWarning, match="jspec does not know new_scale, rope_scaling.section; if what"):
        _ = Checkpoint.open(tmp_path / "target").config


def test_a_key_of_a_draft_head_that_nothing_reads_is_named(tmp_path):
    folder = eagle3(tmp_path, eagle_config={"use_aux_hidden_state": True, "new_norm": True}, gate=1)
    with pytest.warns(UserWarning, match="jspec does not know eagle_config.new_norm, gate;"):
        _ = Checkpoint.open(folder).config


def test_keys_that_change_nothing_are_not_named(tmp_path):
    legacy = {
        "torch_dtype": "bfloat16",
        "_name_or_path": "x",
        "do_sample": True,
        "attention_dropout": 0.1,
        "new_key": None,
        "bos_token": "<s>",  # GPTQModel writes these two where config.json had no ids of them
        "eos_token": "</s>",
    }
    tiny_checkpoint(tmp_path, **legacy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _ = Checkpoint.open(tmp_path).config


@pytest.mark.parametrize("change", [{}, {"per_layer_config": None}])
@pytest.mark.parametrize("full", [16, 32])
def test_layers_of_gemma4_have_the_sizes_that_transformers_gives_them(tmp_path, full, change):
    """transformers writes an empty ``per_layer_config`` where full and sliding attention have heads of one size."""
    sizes = {**GEMMA4_SMALL, "head_dim": 16, "global_head_dim": full}
    written = json.loads(json.dumps(transformers.Gemma4TextConfig(**{**SIZES, **sizes}).to_dict()))
    assert (written["per_layer_config"] == {}) == (full == 16)
    raw = {**written, "architectures": ["Gemma4ForCausalLM"], **change}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = transformers.Gemma4TextConfig.from_dict(copy.deepcopy(raw))
    config = decoder_config(Folder(tmp_path), read_fields(Folder(tmp_path)))
    found = [config.layer(number).head_dim for number in range(config.num_layers)]
    assert found == [layer.head_dim for layer in theirs.per_layer_config]


def test_a_model_type_stands_for_the_class_that_transformers_reads(tmp_path):
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {kind: mapping[kind] for kind in MODEL_TYPES} == MODEL_TYPES
    assert set(MODEL_TYPES.values()) == set(FAMILIES)
    raw = {**tiny_config("Qwen3ForCausalLM"), "model_type": "qwen3"}
    with_class, _ = read(tmp_path, raw)
    for none in (None, []):
        assert read(tmp_path, {**raw, "architectures": none})[0] == with_class != None  # noqa: E711
    (tmp_path / "config.json").write_text(json.dumps({**raw, "model_type": "llama"}))
    with pytest.raises(
        Refusal, match=r"architectures=\['Qwen3ForCausalLM'\] and model_type='llama', which transformers"
    ):
        decoder_config(Folder(tmp_path), read_fields(Folder(tmp_path)))
