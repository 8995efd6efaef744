"""Configs of draft heads: the values that they refuse, the parameters that they count, the targets that they fit."""

import dataclasses
import math

import pytest
from engines import TARGET
from head_configs import BLOCK, DFLASH2, EAGLE3, HEADS, LILICORR, ONE_LAYER, REDUCED, D, V

from jspec.config import EngineConfig
from jspec.config.heads import (
    BlockConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    MLPConfig,
    MTPConfig,
    PardConfig,
    default_aux_layers,
)
from jspec.config.heads.block_corrections import DominoConfig
from jspec.config.param_specs import Declared
from jspec.loading.memory_budget import ModelMemory
from jspec.models import abstract_params

DOMINO = DominoConfig(7, 9, 2)


class Plain(Declared):
    """A config of nothing."""

    dimensions, parameters = {}, ()


@pytest.mark.parametrize("head", [*HEADS, *REDUCED])
def test_parameter_counts_are_those_of_the_params(head):
    assert head.num_parameters == sum(math.prod(leaf.shape) for leaf in abstract_params(head).values())


@pytest.mark.parametrize("head", HEADS)
def test_memory_budget_counts_the_head(head):
    config = EngineConfig(max_batch=2, max_len=16)
    alone, with_head = (ModelMemory(TARGET, draft, 5).budget(config) for draft in (None, head))
    assert with_head.weights - alone.weights == 4 * head.num_parameters
    layers = head.decoder
    slots = config.pool_pages * config.page_size
    assert with_head.cache - alone.cache == (0 if layers is None else layers.kv_bytes(slots, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_vocab_size": V + 1}, rf"draft_vocab_size={V + 1}: expected an integer in 1..{V}"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"own_head": False}, rf"draft_vocab_size=20: expected {V}, .*because its head is borrowed"),
        ({"aux_layers": (1, 2)}, r"aux_layers=\(1, 2\): expected 3 layer ids"),
        ({"aux_layers": (2, 1, 3)}, "ascending"),
        ({"aux_layers": (1, 1, 3)}, "ascending"),
        ({"aux_layers": (-1, 1, 3)}, "at least 0"),
        (
            {"num_aux_layers": 0, "aux_layers": None, "target_hidden_size": D + 1},
            f"target_hidden_size={D + 1}: expected {D}",
        ),
        ({"mask_token_id": V}, f"mask_token_id={V}"),
        ({"trained_drafts": 0}, "trained_drafts=0"),
        ({"norm_before_fuse": True, "norm_each_aux": True}, "expected at most one of them"),
        ({"norm_output": True, "norm_before_head": False}, "expected a final norm to feed back from"),
        ({"num_aux_layers": 0, "aux_layers": None, "fuse_bias": True}, "expected auxiliary hidden states to fuse"),
    ],
)
def test_bad_eagle3_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(EAGLE3, **change)


def by_slot(causal: bool, window: int | None, block_size: int) -> BlockConfig:
    layers = dataclasses.replace(ONE_LAYER, windows=(window,))
    return BlockConfig(layers, V, D, (1,), block_size, 0, False, (causal,), windows_by_slot=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PardConfig(TARGET, V), f"mask_token_id={V}"),
        (lambda: MLPConfig(V, D, 0, 3), "inner_size=0"),
        (lambda: MLPConfig(V, D, 8, 0), "num_stages=0"),
        (lambda: MedusaConfig(V, D, 0), "num_heads=0"),
        (lambda: MedusaConfig(V, D, 1, num_blocks=-1), "num_blocks=-1"),
        (
            lambda: MLPConfig(V, D, 8, 3, quantization="int2"),
            "quantization='int2': expected one of None, int8, fp8, int4",
        ),
        (
            lambda: MedusaConfig(V, D, 1, quantization="int2"),
            "quantization='int2': expected one of None, int8, fp8, int4",
        ),
        (
            lambda: MLPConfig(V, D, 8, 3, draft_vocab_size=V),
            rf"draft_vocab_size={V}: expected None or .* in 1..{V - 1}",
        ),
        (
            lambda: MedusaConfig(None, D, 3, own_head=False, draft_vocab_size=5),
            "draft_vocab_size=5: .* a known vocab_size",
        ),
        (lambda: EagleConfig(ONE_LAYER, draft_vocab_size=0), "draft_vocab_size=0"),
        *(
            (lambda flag=flag, W=W, n=n: by_slot(flag, W, n), "windows_by_slot=True: .* have windows of at least 5")
            for flag, W, n in ((True, 8, 5), (False, None, 5), (False, 4, 5))
        ),
        (
            lambda: MTPConfig(ONE_LAYER).with_draft_vocabulary(V),
            rf"draft_vocab_size={V}: expected None or .* in 1..{V - 1}",
        ),
        (lambda: Plain().with_draft_vocabulary(5), "draft_vocab_size=5: Plain has no draft vocabulary; leave it out"),
        (
            lambda: dataclasses.replace(TARGET, tie_embeddings=True, draft_vocab_size=5),
            "tie_embeddings=True: expected False",
        ),
    ],
)
def test_bad_configs_of_other_heads_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_name_their_method():
    methods = [head.method for head in HEADS]
    assert (
        methods
        == ["eagle"] * 3
        + ["eagle3", "parallel", "eagle3", "eagle3", "eagle3", "parallel"]
        + ["mlp"] * 3
        + ["medusa"] * 2
        + ["dflash", "dspark", "dspark"]
        + ["dflash"] * 4
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "block_size=1: expected an integer of at least 2"),
        ({"aux_layers": ()}, r"aux_layers=\(\): expected layer ids of at least 0, ascending"),
        ({"aux_layers": (3, 1)}, "ascending"),
        ({"causal": (True,)}, "expected True or False for each of 2 layers"),
        ({"mask_token_id": V}, f"mask_token_id={V}"),
        ({"markov": "chain"}, "markov='chain': expected None or one of vanilla, gated, rnn"),
        ({"markov_rank": 4}, "markov_rank=4: expected an integer of at least 1 with a Markov head, 0 without"),
        ({"markov": "rnn"}, "markov_rank=0"),
        ({"confidence": "markov"}, "confidence='markov': expected one of"),
        ({"draft_vocab_size": 9}, rf"draft_vocab_size=9: expected {V}, .*because its head is borrowed"),
        ({"conv_taps": 2}, rf"conv_group=0: expected an integer in 1..{D} in a DFlash2 head"),
        ({**DFLASH2, "conv_taps": 6}, "conv_taps=6: expected an integer in 1..5"),
        ({**DFLASH2, "conv_group": 5}, f"conv_group=5: expected a divisor of the hidden size, {D}"),
        ({**DFLASH2, "candidates": V + 1}, rf"candidates={V + 1}: expected an integer in 1..{V}"),
        ({**DFLASH2, "markov": "vanilla", "markov_rank": 3}, "markov='vanilla': expected None in a DFlash2 head"),
        ({**DFLASH2, "draft_vocab_size": 9, "own_head": True}, f"draft_vocab_size=9: expected {V}: a DFlash2 head"),
        ({**DFLASH2, "lilicorr": LILICORR}, r"selector_rank=6: expected an integer in 0..0 in a LiLiCorr head"),
        ({"lilicorr": LILICORR}, rf"candidates=0: expected an integer in 1..{V} in a LiLiCorr head"),
        (
            {"lilicorr": LILICORR, "candidates": 4, "conv_taps": 2},
            r"conv_group=0: expected an integer in 1..\d+ in a LiLi",
        ),
        (
            {"lilicorr": LILICORR, "candidates": 4, "anchor_first": True},
            "anchor_first=True: expected False in a LiLiCorr",
        ),
        ({"domino": DOMINO}, "anchor_first=False: expected True in a Domino head"),
        (
            {"domino": DOMINO, "anchor_first": True, "markov": "rnn", "markov_rank": 3},
            "markov='rnn': expected None in a Dom",
        ),
        ({"domino": DOMINO, **DFLASH2}, "is_dflash2=True: expected False in a Domino head"),
    ],
)
def test_bad_block_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BLOCK, **change)


def test_block_drafters_fit_their_target():
    BLOCK.require_fit(TARGET)
    with pytest.raises(ValueError, match=r"reads auxiliary layers \(1, 9\), and the target has 3 layers"):
        dataclasses.replace(BLOCK, aux_layers=(1, 9)).require_fit(TARGET)
    with pytest.raises(ValueError, match="hidden size of 24"):
        dataclasses.replace(BLOCK, target_hidden_size=24).require_fit(TARGET)


def test_max_drafts_follows_the_weights():
    assert MLPConfig(V, D, 8, 3).max_drafts == 3
    assert MLPConfig(V, D, 8, 3, tied=True).max_drafts is None
    assert MedusaConfig(V, D, 5).max_drafts == 5
    assert EAGLE3.max_drafts is None
    assert (BLOCK.max_drafts, dataclasses.replace(BLOCK, anchor_first=True).max_drafts) == (4, 5)


def test_default_aux_layers_are_those_of_vllm():
    assert default_aux_layers(32) == (2, 16, 29)
    assert default_aux_layers(6) == (1, 3, 5)  # 2, 3 and 3 are not three different ones
    assert default_aux_layers(3) == (1, 2)
    deep = dataclasses.replace(TARGET, num_layers=36, windows=())
    assert dataclasses.replace(EAGLE3, aux_layers=None).resolved_aux_layers(deep) == (2, 18, 33)
    assert EAGLE3.resolved_aux_layers(deep) == (1, 2, 3)
    assert Eagle3Config(ONE_LAYER, 7, D, 0).resolved_aux_layers(deep) == ()
    assert EagleConfig(ONE_LAYER).resolved_aux_layers(deep) == ()


def test_fitting_head_is_accepted():
    EAGLE3.require_fit(TARGET)
    EagleConfig(ONE_LAYER).require_fit(TARGET)
    MLPConfig(V, D, 12, 4).require_fit(TARGET)
    MedusaConfig(V, D, 3).require_fit(TARGET)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (EagleConfig(dataclasses.replace(ONE_LAYER, hidden_size=32)), f"hidden size of 32, and this target's is {D}"),
        (dataclasses.replace(EAGLE3, target_hidden_size=32), f"hidden size of 32, and this target's is {D}"),
        (MLPConfig(V, 32, 12, 4), f"mlp head .*hidden size of 32, and this target's is {D}"),
        (MedusaConfig(V, 32, 3), f"hidden size of 32, and this target's is {D}"),
        (EagleConfig(dataclasses.replace(ONE_LAYER, vocab_size=31)), f"vocabulary of 31, and this target's is {V}"),
        (MedusaConfig(31, D, 3), f"vocabulary of 31, and this target's is {V}"),
        (dataclasses.replace(EAGLE3, aux_layers=(1, 2, 4)), r"layers \(1, 2, 4\), and the target has 3 layers"),
    ],
)
def test_head_of_another_target_is_refused_with_both_sizes(head, message):
    with pytest.raises(ValueError, match=message):
        head.require_fit(TARGET)


def test_shallow_target_needs_listed_aux_layers():
    six, three = (dataclasses.replace(TARGET, num_layers=n, windows=()) for n in (6, 3))
    anywhere = dataclasses.replace(EAGLE3, aux_layers=None)
    anywhere.require_fit(six)
    assert anywhere.resolved_aux_layers(six) == (1, 3, 5)
    with pytest.raises(ValueError, match=r"reads 3 auxiliary hidden states .*target of 3 layers has 2 by default"):
        anywhere.require_fit(three)
