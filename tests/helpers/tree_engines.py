"""Models with trees of drafts, and the same targets alone: small enough to be served in every way that there is."""

import dataclasses
import functools

import numpy as np
from disturbances import outcome_of, serve
from engines import MAX_LEN, TARGET, V, in_bytes, requests_of, shared
from engines import target as plain_target
from flax import nnx
from heads import VARIANTS, random_head, serving
from lossless.distributions import Grammar
from lossless.served import Automaton
from requests_and_engines import CONFIG as FEW_PAGES
from requests_and_engines import PARAMS, PROMPTS
from tiny import tiny_config

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.config import model_config
from jspec.config import EngineConfig, Speculation, TreeShape
from jspec.drafting.methods import drafter_for
from jspec.drafting.plain import NoDrafts
from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest, Request
from jspec.llm import LLM
from jspec.models import Decoder, build, flat_params, init
from jspec.sampling.params import SamplingParams


class OneBucket(EngineConfig):
    """Has rounds of one number of rows, though nothing else is pinned."""

    _has_one_bucket = True


# Nothing else is as large as a pool of pages, and requests of all kinds share their calls.
CONFIG = OneBucket(**dataclasses.asdict(FEW_PAGES) | {"num_pages": 1_500, "reproducible": False})
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


def engine_of(kind: str) -> Engine:
    """The engine of ``llm_of`` a kind, without the pages of earlier prompts."""
    engine = llm_of(kind).engine
    engine.scheduler.pages.forget_prefixes()
    return engine


def with_params(requests: list[Request], **fields) -> list[Request]:
    """The same requests with other settings."""
    return [dataclasses.replace(one, params=dataclasses.replace(one.params, **fields)) for one in requests]


def texts(actives: list[ActiveRequest]) -> list[list[int]]:
    return [active.tokens for active in actives]


@functools.cache
def expected(kind: str) -> list[list[int]]:
    """The texts of ``REQUESTS``, each by itself, of the target alone."""
    return alone(kind, REQUESTS)


def alone(kind: str, requests: list[Request]) -> list[list[int]]:
    engine = llm_of(kind, None).engine
    engine.scheduler.pages.forget_prefixes()
    return [texts(serve(engine, [request]))[0] for request in requests]


ANY = Grammar(tuple(tuple((v + s) % 3 if (v + s) % 3 else -1 for v in range(V)) for s in range(3)), (-1, -1, 5))
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0, 5: -0.5}}
OPTIONS = {
    "logprobs": {"logprobs": 2},
    "penalties": PENALTIES,
    "everything": PENALTIES | {"logprobs": 1, "logprobs_mode": "processed_logprobs", "allowed_token_ids": range(1, 25)},
    "grammar": {},
    "grammar and penalties": PENALTIES | {"logprobs": 0},
}
BAD_WORDS = ((3,), (5, 7), (2, 9, 4))


def with_options(requests: list[Request], name: str) -> list[Request]:
    some = with_params(requests, max_tokens=10, **OPTIONS[name])
    if "grammar" in name:
        return [dataclasses.replace(one, constraint=Automaton(ANY)) for one in some]
    if name == "everything":
        some = with_params(some, bad_words=["?"], min_tokens=6)  # text of which these are the tokens
        return [dataclasses.replace(one, bad_words=BAD_WORDS, stop_tokens=(6, 11)) for one in some]
    return some


def outcomes(actives: list[ActiveRequest]) -> list[tuple]:
    """What clients learn of requests, and how deep their drafts were."""
    return [(*outcome_of(active), active.deepest) for active in actives]


def numbers(llm: LLM, actives: list[ActiveRequest]) -> list[np.ndarray | None]:
    """The log-probabilities of each request."""
    return [llm.engine.frontend.result(active).token_logprobs for active in actives]
