"""The decode step of mixtures of experts as XLA compiles it for an H200: no weight or cache is moved, launches stay few.

Layers have the widths of the published models, and all of their experts."""

import dataclasses
import functools

import pytest
from deviceless import compiled_round, why_not

from benchmarks.random_modules import abstract_module
from benchmarks.rounds.hlo import launched, moves
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import GEMMA4_26B_A4B, GLM_47_FLASH, GPT_OSS_20B, QWEN3_30B_A3B

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

LARGE = 1 << 20  # bytes
LAYERS = 3  # what layers share, they share from the third on at the latest
MODELS = {"qwen3": QWEN3_30B_A3B, "gpt-oss": GPT_OSS_20B, "glm": GLM_47_FLASH, "gemma-4": GEMMA4_26B_A4B}
# Launches of one more layer, by model and rows. Those of Llama's layer are in test_decode_step.py.
LAYER_BUDGET = {("qwen3", 1): 11, ("qwen3", 64): 11, ("gpt-oss", 1): 10, ("gpt-oss", 64): 15}
LAYER_BUDGET |= {("glm", 1): 14, ("glm", 64): 15, ("gemma-4", 1): 20, ("gemma-4", 64): 19}


@functools.cache
def compiled(model: str, batch: int, layers: int):
    config = MODELS[model]
    experts = dataclasses.replace(config.experts, layers=config.experts.layers[:layers])
    lists = {name: getattr(config, name)[:layers] for name in ("windows", "layer_ropes", "layers")}
    fewer = dataclasses.replace(config, num_layers=layers, experts=experts, **lists)
    target = abstract_module(fewer)
    what = Decoding(None, 0, batch, start=512, new=256)
    return compiled_round(what, target)[0]


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("model", MODELS)
class TestStep:
    def test_moves_no_cache_and_no_weight(self, model, batch):
        assert [op.line for op in moves(compiled(model, batch, LAYERS).as_text(), LARGE)] == []

    def test_a_layer_launches_no_more_than_it_did(self, model, batch):
        fewer, more = (len(launched(compiled(model, batch, n).as_text(), loop=True)) for n in (LAYERS, LAYERS + 1))
        assert 0 < more - fewer <= LAYER_BUDGET[model, batch]
