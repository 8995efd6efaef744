"""Configs of draft heads of every kind."""

import dataclasses

from engines import TARGET

from jspec.config.heads import BlockConfig, Eagle3Config, EagleConfig, MedusaConfig, MLPConfig, MTPConfig, PardConfig
from jspec.config.heads.block_corrections import DominoConfig, LiLiCorrConfig

V, D = TARGET.vocab_size, TARGET.hidden_size
ONE_LAYER = dataclasses.replace(TARGET, num_layers=1, windows=())
TWO_LAYERS = dataclasses.replace(TARGET, num_layers=2, windows=(), qk_norm=True, qkv_bias=True)
EAGLE3 = Eagle3Config(ONE_LAYER, 20, D, 3, (1, 2, 3))
BLOCK = BlockConfig(TWO_LAYERS, V, D, (1, 3), 5, 0, False, (False, False), confidence="hidden")
DFLASH2 = {"conv_taps": 2, "conv_group": 4, "selector_rank": 6, "candidates": 5}
LILICORR = LiLiCorrConfig(6, num_layers=2, num_heads=2, inner_size=9, factor_size=4, scale=3.0, eps=1e-3)
HEADS = [
    EagleConfig(ONE_LAYER),
    EagleConfig(TWO_LAYERS, fuse_bias=True, own_embedding=True),
    EagleConfig(TWO_LAYERS, own_embedding=True, norms=True),
    EAGLE3,
    Eagle3Config(TWO_LAYERS, V, 24, 2, (0, 3), norm_before_fuse=True, own_embedding=True, mask_token_id=3),
    Eagle3Config(ONE_LAYER, V, D, 3, (0, 1, 2), norm_each_aux=True, own_head=False),
    Eagle3Config(ONE_LAYER, 7, D, 0),
    Eagle3Config(ONE_LAYER, 7, D, norm_before_head=False, fuse_bias=True),
    PardConfig(TARGET, 5),
    MLPConfig(V, D, 12, 4),
    MLPConfig(V, D, 12, 4, tied=True),
    MLPConfig(V, D, 12, 1, tied=True),
    MedusaConfig(V, D, 3),
    MedusaConfig(V, D, 3, num_blocks=2, own_head=False),
    BLOCK,
    dataclasses.replace(BLOCK, markov="rnn", markov_rank=5, confidence="markov"),
    BlockConfig(TWO_LAYERS, 9, D, (0, 2), 4, 3, True, (False, True), "gated", 4, own_embedding=True, own_head=True),
    dataclasses.replace(BLOCK, **DFLASH2),
    dataclasses.replace(BLOCK, anchor_first=True, domino=DominoConfig(7, 9, 2)),
    dataclasses.replace(BLOCK, candidates=4, lilicorr=LILICORR),
    dataclasses.replace(BLOCK, **DFLASH2 | {"selector_rank": 0}, lilicorr=dataclasses.replace(LILICORR, hidden_size=D)),
]
# The draft vocabularies of heads whose checkpoints have none, and heads whose linear maps take eight bits.
REDUCED = [
    EagleConfig(TWO_LAYERS, draft_vocab_size=9),
    PardConfig(TARGET, 5).with_draft_vocabulary(9),
    MLPConfig(V, D, 12, 4, draft_vocab_size=9),
    MedusaConfig(V, D, 3, draft_vocab_size=9),
    MedusaConfig(V, D, 3, own_head=False, draft_vocab_size=9),
    MTPConfig(TWO_LAYERS, draft_vocab_size=9),
    BLOCK.with_draft_vocabulary(9),
    HEADS[4].with_draft_vocabulary(9),
    dataclasses.replace(BLOCK, anchor_first=True, domino=DominoConfig(7, 9, 2)).with_draft_vocabulary(9),
]
QUANTIZED = [
    head.with_quantization(kind)
    for kind in ("int8", "fp8", "int4")
    for head in (*HEADS, *REDUCED, MTPConfig(ONE_LAYER))
]
