"""Models with trees of drafts, and the same targets alone: small enough to be served in every way that there is."""

import dataclasses

from engines import MAX_LEN, TARGET, V, in_bytes, requests_of, shared
from engines import target as plain_target
from flax import nnx
from heads import VARIANTS, random_head, serving
from requests_and_engines import CONFIG as FEW_PAGES
from requests_and_engines import PARAMS, PROMPTS
from tiny import tiny_config

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.config import model_config
from jspec.config import EngineConfig, Speculation, TreeShape
from jspec.drafting.methods import drafter_for
from jspec.drafting.plain import NoDrafts
from jspec.engine.request import Request
from jspec.llm import LLM
from jspec.models import Decoder, build, flat_params, init
from jspec.sampling.params import SamplingParams

CONFIG = dataclasses.replace(FEW_PAGES, num_pages=1_500)  # so that nothing else is as large as a pool of pages
SHAPE = TreeShape(nodes=10, depth=3, branch=2)  # more than two pages, as each of them has four slots
KINDS = ("plain", "fp8 cache", "fp8 cache of tokens", "int4", "sinks")
# Beside those of other tests, one that ends where its row does.
REQUESTS = requests_of([*PROMPTS, PROMPTS[6]], [*PARAMS, SamplingParams(temperature=1.2, max_tokens=MAX_LEN)])


@shared
def target_of(kind: str) -> Decoder:
    """A target with windows longer than trees are deep."""
    if kind == "int4":
        config = dataclasses.replace(TARGET, windows=(12, None, 4), quantization="int4_32_float16_zeros")
        return init(config, nnx.Rngs(3))
    if kind == "sinks":
        keys = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4, "num_hidden_layers": 3}
        architecture = "GptOssForCausalLM"
        config = model_config(Fields(tiny_config(architecture, **keys), architecture), architecture)
        return random_head(config.for_length(MAX_LEN))
    model = build(dataclasses.replace(TARGET, windows=(12, None, 4)), flat_params(plain_target()))
    return model if kind == "plain" else in_bytes(model, "fp8" if kind == "fp8 cache" else "fp8_per_token_head")


@shared
def llm_of(kind: str = "plain", head: str | None = "eagle", config: EngineConfig = CONFIG, **speculation) -> LLM:
    """A model that drafts trees of ``SHAPE``, or as ``speculation`` says; without a head, the target alone."""
    model, how = target_of(kind), {"tree": SHAPE, **speculation}
    if head is None:
        return LLM(model, None, lambda *_: NoDrafts(), None, None, Speculation(), config)
    draft, settings = VARIANTS[head], Speculation(**how)
    make = drafter_for(draft, model.config, settings)
    return LLM(model, serving(draft, random_head(draft)), make, draft.method, None, settings, config)


def with_params(requests: list[Request], **fields) -> list[Request]:
    """The same requests with other settings."""
    return [dataclasses.replace(one, params=dataclasses.replace(one.params, **fields)) for one in requests]
