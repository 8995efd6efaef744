"""The model under test of a comparison: what jspec computes, in passes over whole texts and with the engine."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import EngineConfig, Speculation
from jspec.doctor.reference import Reading
from jspec.drafting.methods import drafter_for
from jspec.llm import LLM
from jspec.models.causal import causal_logits
from jspec.models.flatten import flatten
from jspec.models.kv_cache import CausalView
from jspec.sampling.params import SamplingParams


def write(model: Any, prompts: Sequence[Sequence[int]], engine: EngineConfig, max_tokens: int) -> list[list[int]]:
    """The greedy completions of prompts by the engine, without drafts and without the tokens that end them."""
    speculation = Speculation(0)
    llm = LLM(model, None, drafter_for(None, model.config, speculation), None, None, speculation, engine)
    greedy, keys = SamplingParams(temperature=0, max_tokens=max_tokens), np.zeros(2, np.uint32)
    count = len(prompts)
    by_index = {i: result for i, _, result in llm.completions(prompts, [greedy] * count, [keys] * count)}
    ends = set(model.config.eos_token_ids)
    texts = [list(by_index[i].token_ids) for i in range(count)]
    return [text[:-1] if text and text[-1] in ends else text for text in texts]


def read(model: Any, texts: Sequence[Sequence[int]]) -> Iterator[Reading]:
    """What the model makes of each text; the hidden states are kept of the first.

    All texts are padded to one length, behind their ends, where no token sees the padding.
    """
    length = 1 << (max(map(len, texts)) - 1).bit_length()
    length = min(length, model.config.max_position)
    every_layer = tuple(range(model.config.num_layers))
    leaves, merge = flatten(model)

    def forward(leaves, tokens, layers):
        model, positions = merge(leaves), jnp.arange(length, dtype=jnp.int32)[None]
        cache = (None,) * model.config.num_layers
        hidden, streams, _ = model.with_auxiliary(tokens, positions, cache, CausalView(positions), layers)
        kept = (streams[0], hidden[0]) if layers else ()
        return model.logits(hidden)[0].astype(jnp.float32), kept

    run = jax.jit(forward, static_argnums=2)
    for index, text in enumerate(texts):
        tokens = np.pad(np.array(text, np.int32), (0, length - len(text)))[None]
        logits, kept = run(leaves, tokens, every_layer if index == 0 else ())
        hidden: tuple[np.ndarray, ...] = ()
        if kept:
            streams, last = (np.asarray(part.astype(jnp.float32))[: len(text)] for part in kept)
            hidden = (*np.split(streams, len(every_layer), axis=-1), last)
        yield Reading(np.asarray(logits)[: len(text)], hidden)


def logits(model: Any, texts: Sequence[Sequence[int] | np.ndarray]) -> Iterator[np.ndarray]:
    """float32 logits ``[T, V]`` of each text, by one pass of a model as it is at this call; padded as for ``read``."""
    length, (leaves, merge) = max(map(len, texts)), flatten(model)
    tokens = (np.pad(np.asarray(text, np.int32), (0, length - len(text)))[None] for text in texts)
    forward = jax.jit(lambda leaves, tokens: causal_logits(merge(leaves), tokens)[0].astype(jnp.float32))
    run = forward.lower(leaves, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
    return (np.asarray(run(leaves, padded))[: len(text)] for padded, text in zip(tokens, texts, strict=True))
