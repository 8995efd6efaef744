"""Block drafters in the layouts of z-lab, JetSpec, SpecForge, DeepSpec and the speculators package: what is read, what is
written back, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_blocks import checkpoint
from heads import VARIANTS, random_head
from resaved import resave, set_keys
from tiny import tiny_checkpoint

from convert import convert, load_draft, verifier_of
from jspec.checkpoints.export import export_draft
from jspec.checkpoints.files.refusal import Mismatch, Refusal
from jspec.checkpoints.layouts.block_settings import ANCHOR_KEYS
from jspec.config.heads import BlockConfig
from jspec.models import flat_params

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}  # of their target
BLOCKS = {
    name: config
    for name, config in VARIANTS.items()
    if isinstance(config, BlockConfig)
    and config.quantization is None  # layouts have no scales
    and not config.windows_from_anchor  # which depends on the layout, below
    and not config.windows_by_slot  # which neither can state
    and config.domino is None  # which is read alone
    and config.lilicorr is None  # likewise
}
NATIVE = [name for name in BLOCKS if name != "xpress"]
# The format has no causal layers without windows.
SPECULATORS = [name for name in BLOCKS if name not in ("jetspec", "dflash2-causal")]


def exported(
    folder: Path, name: str, layout: str, change: dict | None = None, **keys
) -> tuple[BlockConfig, dict, Path]:
    """Config and params of a head, and where it was written. ``change`` is of its config, ``keys`` are of config.json."""
    windows = {"windows": ()} if layout == "native" and not any(BLOCKS[name].causal) else {}
    layers = dataclasses.replace(BLOCKS[name].layers, **windows)
    change = change or {"windows_from_anchor": layout == "speculators" and any(BLOCKS[name].causal)}
    config = dataclasses.replace(BLOCKS[name], layers=layers, **change)
    params = {name: np.asarray(array) for name, array in flat_params(random_head(config)).items()}
    export_draft(folder, config, params, target_name="the/target", dtype="float32", layout=layout)
    return config, params, set_keys(folder, **keys)


def same(found, expected):
    assert found.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, dict(found), dict(expected))


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "native") for name in NATIVE), *((name, "speculators") for name in SPECULATORS)],
)
def test_block_drafters_that_are_exported_are_read_again(tmp_path, name, layout):
    config, params, folder = exported(tmp_path / "head", name, layout)
    found, back = load_draft(folder)
    assert found == config
    same(back, params)
    convert(folder, tmp_path / "converted")
    found, back = load_draft(tmp_path / "converted")
    assert found == config
    same(back, params)
    assert verifier_of(folder) == ("the/target" if layout == "speculators" else None)


def test_windows_in_layers_that_are_not_causal_are_stated(tmp_path):
    config, _, folder = exported(tmp_path / "head", "dflash", "speculators", {"causal": (False, False)})
    assert json.loads((folder / "config.json").read_text())["sliding_window_non_causal"]
    assert load_draft(folder)[0] == config
    with pytest.raises(ValueError, match=r"causal=\(False, False\): expected True for each layer, or \(False, True\)"):
        exported(tmp_path / "native", "dflash", "native", {"causal": (False, False)})


def test_a_window_is_counted_from_the_anchor_where_speculators_trained_the_head(tmp_path):
    """Neither layout can state the rule of the other, and a head is not written with another than its own."""
    for layout, other in (("speculators", False), ("native", True)):
        assert load_draft(exported(tmp_path / layout, "dflash", layout)[2])[0].windows_from_anchor is not other
        with pytest.raises(ValueError, match=f"windows_from_anchor={other}: expected {not other} in"):
            exported(tmp_path / "other", "dflash", layout, {"windows_from_anchor": other})
        both_ways = dataclasses.replace(BLOCKS["dflash2"], windows_by_slot=not other)
        with pytest.raises(ValueError, match=f"windows_by_slot={not other}: expected {other} in"):
            export_draft(tmp_path / "other", both_ways, {}, target_name="the/target", layout=layout)


def test_settings_in_a_nested_object_are_read(tmp_path):
    config, _, folder = exported(tmp_path / "head", "dspark-rnn", "native")
    fields = json.loads((folder / "config.json").read_text())
    moved = {key: fields[key] for key in ("target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type")}
    set_keys(folder, **dict.fromkeys(moved, ...), architectures=["DSparkDraftModel"], dflash_config=moved)
    assert load_draft(folder)[0] == config


@pytest.mark.parametrize(
    ("keys", "anchor_first"),
    [
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}, True),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}}, False),
    ],
)
def test_the_number_of_drafts_says_whether_the_anchor_drafts(tmp_path, keys, anchor_first):
    _, _, folder = exported(tmp_path / "head", "dflash", "speculators", sample_from_anchor=None, **keys)
    config, _ = load_draft(folder)
    assert (config.anchor_first, config.max_drafts) == (anchor_first, 5 if anchor_first else 4)


REFUSED = [
    ("dflash", {"block_size": None}, "block_size is missing"),
    ("dflash", {"dflash_config": {"target_layer_ids": [1, 0, 2], "mask_token_id": 5}}, "ascending"),
    ("dflash", {"dflash_config": {"target_layer_ids": [], "mask_token_id": 5}}, "a list of layer ids of at least -1"),
    (
        "dflash",
        {"dflash_config": {"target_layer_ids": [-2, 0, 2], "mask_token_id": 5}},
        "a list of layer ids of at least -1",
    ),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 5}}, "reads 48 numbers"),
    ("dflash", {"dflash_config": {"target_layer_ids": [-1, 1, 2]}}, "names the token of mask slots"),
    ("dflash", {"dflash_config": {"target_layer_ids": [-1, 1, 2], "mask_token_id": 29}}, "mask_token_id=29"),
    ("dflash", {"num_hidden_layers": 3}, "num_hidden_layers=3: expected 2"),
    ("dflash", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: expected null"),
    ("dflash", {"output_multiplier": 2.0}, "output_multiplier=2.0: expected 1"),
    ("dflash", {"markov_rank": 4}, "markov_rank=4: expected 0 or none"),
    ("dflash", {"draft_vocab_size": 20}, "draft_vocab_size=20: expected 29"),
    ("dspark", {"markov_rank": 5}, "markov_rank=5: expected 6"),
    ("dspark", {"markov_head_type": "vanilla"}, "'gated', because tensor 'markov_head.gate_proj.weight' is there"),
    ("dspark", {"architectures": ["Gemma4DSparkModel"]}, "draft heads of Gemma 4 are not supported"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED)
def test_contradictions_are_refused(tmp_path, name, keys, message):
    _, _, folder = exported(tmp_path / "head", name, "native", **keys)
    if "target_layer_ids" in str(keys) and "[0, 1]" in str(keys):
        # 48 numbers are three of 16, and not two
        resave(folder, add=lambda stored: {"fc.weight": stored["fc.weight"][:, :47].copy()})
        message = "reads 47 numbers"
    with pytest.raises(Refusal) as refusal:
        load_draft(folder)
    assert message in str(refusal.value)


@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_windows_of_a_dflash2_head_are_stated(tmp_path, layout):
    layers = dataclasses.replace(BLOCKS["dflash2"].layers, windows=(9, 9))
    head = dataclasses.replace(BLOCKS["dflash2"], layers=layers, windows_by_slot=layout == "native")
    params = {name: np.asarray(array) for name, array in flat_params(random_head(head)).items()}
    export_draft(tmp_path / "head", head, params, target_name="the/target", dtype="float32", layout=layout)
    assert load_draft(tmp_path / "head")[0] == head


def test_defaults_of_dflash2_in_the_speculators_format(tmp_path):
    """Absent keys stand for the defaults of its class: windows that are not causal, 16 candidates."""
    _, _, folder = exported(tmp_path / "head", "dflash2", "speculators", selector_top_k=None, sample_from_anchor=False)
    window = {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2}
    set_keys(set_keys(folder, within="transformer_layer_config", **window), sliding_window_non_causal=...)
    config = load_draft(folder)[0]
    assert (config.candidates, config.layers.windows, config.causal) == (16, (9, 9), (False, False))


# What ``save_pretrained`` of speculators 0.9.0 writes besides what an export has.
OF_SPECULATORS = {
    "auto_map": {"": "config.DFlash2SpeculatorConfig"},
    "dtype": "float32",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "transformers_version": "5.24.0",
}
OF_ITS_LAYERS = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_window_layers": 28,
    "pad_token_id": None,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "rope_scaling": None,
    "rope_theta": None,
    "sliding_window": 9,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": True,
}


def test_configs_that_speculators_writes_are_read_without_a_warning(tmp_path):
    _, params, folder = exported(tmp_path / "head", "dflash2", "speculators", **OF_SPECULATORS)
    set_keys(folder, within="transformer_layer_config", **OF_ITS_LAYERS)
    config, back = load_draft(folder)
    assert (config.layers.windows, config.causal, config.layers.rope.theta) == ((9, None), (False, False), 1e6)
    assert (config.conv_taps, config.conv_group, config.selector_rank, config.candidates) == (2, 4, 6, 5)
    assert verifier_of(folder) == "the/target"
    same(back, params)


def test_what_model_optimizer_adds_to_a_dflash2_head_is_known(tmp_path):
    config, _, folder = exported(tmp_path / "head", "dflash2", "native")
    set_keys(folder, within="dflash_config", projector_type="dflash2", block_size=config.block_size, causal=False)
    assert load_draft(folder)[0] == config
    with pytest.raises(Refusal, match=": block_size=9: expected 5, as in dflash_config"):
        load_draft(set_keys(folder, block_size=9))


def test_a_dflash2_head_gets_no_draft_vocabulary(tmp_path):
    _, _, folder = exported(tmp_path / "head", "dflash2", "native")
    with pytest.raises(Refusal, match="draft_vocab_size=3: expected 29: a DFlash2 head has the target's whole voc"):
        convert(
            folder, tmp_path / "out", draft_vocabulary=[1, 2, 3], target=tiny_checkpoint(tmp_path / "target", **SIZES)
        )


DFLASH2_REFUSED = [
    ({"conv_kernel_size": 3}, {}, "conv_kernel_size=3: expected 2, because of the shape of tensor 'layers.0.att"),
    ({"conv_group_size": 8}, {}, "conv_group_size=8: expected 4, because of the shape of tensor 'layers.0.attention"),
    ({"selector_rank": 8}, {}, "selector_rank=8: expected 6, because of the shape of tensor 'candidate_selector.pred"),
    ({"selector_top_k": 30}, {}, "candidates=30: expected an integer in 1..29 in a DFlash2 head"),
    ({"selector_top_k": None}, {}, "selector_top_k is missing"),
    ({"conv_kernel_size": "two"}, {}, "conv_kernel_size='two'"),
    ({}, {"layers.1.mlp_conv.base_kernel": None}, "tensor 'layers.1.mlp_conv.base_kernel' is missing"),
    ({}, {"candidate_selector.successor_codebook": np.zeros((29, 5), np.float32)}, "[29, 5]"),
    ({"markov_rank": 4}, {"markov_head.markov_w1.weight": np.zeros((29, 4), np.float32)}, "markov='vanilla'"),
]


@pytest.mark.parametrize(("keys", "changes", "message"), DFLASH2_REFUSED)
def test_contradictions_of_dflash2_heads_are_refused(tmp_path, keys, changes, message):
    _, _, folder = exported(tmp_path / "head", "dflash2", "native")
    set_keys(folder, within="dflash_config", **keys)
    added = {name: array for name, array in changes.items() if array is not None}
    resave(folder, add=added, drop=changes.keys() - added.keys())
    with pytest.raises((Refusal, Mismatch)) as refusal:
        load_draft(folder)
    assert message in str(refusal.value)


BIAS, MARKOV = {"prefix_gru.bias_ih_l0": np.zeros(30, np.float32)}, np.zeros((37, 4), np.float32)
CORRECTED_REFUSED = [
    ("domino", {"gru_hidden_dim": None}, {}, ": gru_hidden_dim is missing"),
    ("domino", {"gru_hidden_dim": 9}, {}, "tensor 'prefix_gru.weight_ih_l0'"),
    ("domino", {"emb_dim": 11}, {}, "emb_dim=12: expected 11, as in dflash_config"),
    ("domino", {"pure_draft_prefix_len": 5}, {}, "uncorrected=5: expected below 5, the slots of the block"),
    ("domino", {"shift_label": False}, {}, "shift_label=False: expected true, because the anchor's slot drafts"),
    ("domino", {"shift_label": False, ANCHOR_KEYS[0]: False}, {}, "anchor_first=False: expected True in a Domino head"),
    ("domino", {"projector_type": "dflash"}, {}, "projector_type='dflash': expected 'domino', because of the class or"),
    ("domino", {}, {"prefix_gru.weight_ih_l0": None}, "tensor 'prefix_gru.weight_ih_l0' is missing"),
    ("domino", {}, BIAS, "prefix_gru.bias_ih_l0"),
    (
        "domino",
        {"markov_rank": 4},
        {"markov_head.markov_w1.weight": MARKOV},
        "markov='vanilla': expected None in a Dom",
    ),
    ("lilicorr", {"lilicorr_enabled": False}, {}, "lilicorr_enabled=False: expected true"),
    ("lilicorr", {"lilicorr_logit_scale": None}, {}, "lilicorr_logit_scale is missing"),
    ("lilicorr", {"lilicorr_vector_eps": 0.5}, {}, "eps=0.5: expected a number between 0 and 0.5"),
    ("lilicorr", {"lilicorr_num_layers": 10**9}, {}, "num_layers=1000000000: expected at most 4096"),
    ("lilicorr", {"lilicorr_num_heads": 5}, {}, "num_heads=5: expected a divisor of the width of the layers, 16"),
    ("lilicorr", {"lilicorr_candidate_topk": 38}, {}, "candidates=38: expected an integer in 1..37 in a LiLiCorr head"),
    ("lilicorr", {"lilicorr_candidate_topk": 3}, {}, "tensor 'lilicorr.rank_embedding'"),
    ("lilicorr", {"conv_kernel_size": 2}, {}, "conv_group_size is missing"),
    ("lilicorr", {ANCHOR_KEYS[0]: True}, {}, "anchor_first=True: expected False in a LiLiCorr head"),
]


@pytest.mark.parametrize(("name", "keys", "changes", "message"), CORRECTED_REFUSED)
def test_contradictions_of_domino_and_lilicorr_heads_are_refused(tmp_path, name, keys, changes, message):
    folder = set_keys(checkpoint(tmp_path / "head", f"model_optimizer/{name}"), within="dflash_config", **keys)
    added = {tensor: array for tensor, array in changes.items() if array is not None}
    resave(folder, add=added, drop=changes.keys() - added.keys())
    with pytest.raises((Refusal, Mismatch)) as refusal:
        load_draft(folder)
    assert message in str(refusal.value)


XPRESS_KEYS = ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes")
XPRESS_REFUSED = [
    ({"xpress_rank": 5}, {}, "xpress_rank=5: expected 6, because of the shape of tensor 'refiner_head.in_proj"),
    ({"xpress_mlp_ratio": 4}, {}, "xpress_mlp_ratio=4: expected 2, because of the shape of tensor 'refiner_head.mlp_g"),
    ({"num_jacobi_passes": 0}, {}, "num_jacobi_passes=0"),
    ({}, {"refiner_head.in_proj.weight": None}, "its files hold no matrices 'refiner_head.in_proj.weight' and"),
    ({}, {"refiner_head.mix_l": np.zeros((6, 4, 4), np.float32)}, "[6, 4, 4]"),
    (
        {"speculators_model_type": "dflash", **dict.fromkeys(XPRESS_KEYS)},
        {},
        "tensor 'refiner_head.down_g.weight' has no place",
    ),
    (
        {"markov_rank": 4},
        {"markov_head.markov_w1.weight": np.zeros((29, 4), np.float32)},
        "refiner_rank, refiner_ratio, refine_passes=(6, 2, 2)",
    ),
]


@pytest.mark.parametrize(("keys", "changes", "message"), XPRESS_REFUSED)
def test_contradictions_of_xpress_heads_are_refused(tmp_path, keys, changes, message):
    _, _, folder = exported(tmp_path / "head", "xpress", "speculators", **keys)
    added = {name: array for name, array in changes.items() if array is not None}
    resave(folder, add=added, drop=changes.keys() - added.keys())
    with pytest.raises((Refusal, Mismatch)) as refusal:
        load_draft(folder)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["domino", "lilicorr"])
@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_domino_and_lilicorr_heads_are_not_exported(tmp_path, name, layout):
    params = {key: np.asarray(array) for key, array in flat_params(random_head(VARIANTS[name])).items()}
    with pytest.raises(ValueError, match=f"{name}=.*: expected None: such a head is read, and not exported"):
        export_draft(tmp_path, VARIANTS[name], params, target_name="t", dtype="float32", layout=layout)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["domino", "lilicorr"])
def test_the_speculators_format_has_no_domino_or_lilicorr_heads(tmp_path, name):
    _, _, folder = exported(tmp_path / "dflash", "dflash", "speculators", projector_type=name)
    with pytest.raises(Refusal, match=f"projector_type='{name}': expected 'dflash', 'dflash2' or 'dspark'"):
        load_draft(folder)


@pytest.mark.parametrize("case", ["domino", "lilicorr", "lilicorr-convolved"])
def test_heads_that_model_optimizer_wrote_are_converted(tmp_path, case):
    """In eight bits, too; without a warning."""
    folder = checkpoint(tmp_path / "head", f"model_optimizer/{case}")
    config, params = load_draft(folder)
    convert(folder, tmp_path / "converted")
    found, back = load_draft(tmp_path / "converted")
    assert found == config
    same(back, params)
    convert(folder, tmp_path / "int8", quantize="int8")
    small, stored = load_draft(tmp_path / "int8")
    assert small == config.with_quantization("int8")
    assert ("domino.out.scale" in stored) == (case == "domino")


def test_absent_keys_of_an_xpress_head_are_the_defaults_of_its_class(tmp_path):
    config, _, folder = exported(tmp_path / "head", "xpress", "speculators", **dict.fromkeys(XPRESS_KEYS))
    assert load_draft(folder)[0] == dataclasses.replace(config, refine_passes=6)
    with pytest.raises(ValueError, match="refiner_rank=6: expected 0 in this layout"):
        exported(tmp_path / "native", "xpress", "native")


def test_a_confidence_head_of_another_width_is_refused(tmp_path):
    _, _, folder = exported(tmp_path / "head", "dspark", "native")
    resave(folder, add={"confidence_head.proj.weight": np.zeros((1, 5), np.float32)})
    with pytest.raises(Refusal, match=r"reads 5 numbers, expected one of \[16, 22\]"):
        load_draft(folder)


def test_export_refuses_heads_the_layout_cannot_express(tmp_path):
    with pytest.raises(ValueError, match="markov='vanilla': expected None where a layer is causal or has a window"):
        exported(tmp_path / "head", "dspark-vanilla", "native", {"causal": (True, True)})
    with pytest.raises(ValueError, match="layout='vllm': expected None or one of"):
        exported(tmp_path / "head", "dflash", "vllm")
    with pytest.raises(ValueError, match="in the speculators format"):
        exported(tmp_path / "head", "jetspec", "speculators")


OTHER_KINDS = {
    "DFlash2BeamDraft": "DFlash2Beam",
}


@pytest.mark.parametrize(
    ("name", "layout", "keys", "message"),
    [
        *(
            ("dflash", "native", {"architectures": [f"{kind}Model"]}, f"{what} heads.* are not supported")
            for kind, what in OTHER_KINDS.items()
        ),
        (
            "dflash",
            "speculators",
            {"speculators_model_type": "mlp"},
            "eagle, dflash, dflash2, dspark, xpress, mtp; other kinds",
        ),
        *(
            (
                "dflash",
                layout,
                {"architectures": [name]},
                f"'{name}'.*: expected the class of a draft head that jspec knows",
            )
            for layout in ("native", "speculators")
            for name in (
                "NewDraftModel",
                "LagunaDFlashDraftModel",
                "KVNativeDSparkDraftModel",
                "LlamaForCausalLM",
                "Qwen3XPressModel",
            )
        ),
        ("dflash2", "speculators", {"speculators_model_type": "dflash"}, "='dflash': expected 'dflash2', because"),
    ],
)
def test_heads_of_other_kinds_with_the_same_tensors_are_refused(tmp_path, name, layout, keys, message):
    _, _, folder = exported(tmp_path / "head", name, layout, **keys)
    with pytest.raises(Refusal, match=message):
        load_draft(folder)
