"""The drafts of whole rounds, by jspec's engine and by transformers' own speculative decoding: what each of them drafts from
behind a text of a length, and the greedy text."""

from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.drafting.drawing import Drawing


class Rounds(NamedTuple):
    """A greedy text, and the rounds that made it.

    Attributes:
      tokens: of the text, without its prompt.
      logits: how many tokens the text had when a round began -> the logits of its drafts, ``[K, V]``.
    """

    tokens: list[int]
    logits: dict[int, np.ndarray]


def by_jspec(llm_of, prompt: Sequence[int], most: int) -> Rounds:
    """The rounds of an engine; ``llm_of()`` loads it."""
    seen: dict[int, np.ndarray] = {}

    def tell(length, live, logits):
        seen.update(
            {int(n): np.asarray(rows) for n, rows, is_live in zip(length, logits, live, strict=True) if is_live}
        )

    def told(context, logits):
        jax.debug.callback(tell, context.length, context.live, logits)

    chain, at_once = Drawing.chain, Drawing.at_once

    def telling_chain(self, logits, carry, read, room, unroll_all=False):
        all_logits = [logits]

        def telling_read(*inputs):
            after, logits = read(*inputs)
            all_logits.append(logits)
            return after, logits

        drawn = chain(self, logits, carry, telling_read, room, unroll_all=True)
        told(self.context, jnp.concatenate(all_logits, axis=1))
        return drawn

    def telling_at_once(self, logits, room):
        told(self.context, logits)
        return at_once(self, logits, room)

    with mock.patch.multiple(Drawing, chain=telling_chain, at_once=telling_at_once):
        llm = llm_of()
        [result] = jspec.generate(llm, [list(prompt)], temperature=0, max_tokens=most, ignore_eos=True)
        jax.effects_barrier()
    return Rounds(list(result.token_ids), seen)


def by_transformers(model, generator: str, prompt: Sequence[int], most: int, **how) -> Rounds:
    """The rounds of ``model.generate``, whose drafts the class ``generator`` of transformers' makes.

    Args:
      how: what asks for these drafts, as ``use_mtp=True``.
    """
    import torch
    from transformers.generation import candidate_generator

    kind, seen = getattr(candidate_generator, generator), {}
    get_candidates = kind.get_candidates

    def telling(self, input_ids, *args, **kwargs):
        tokens, logits = get_candidates(self, input_ids, *args, **kwargs)
        if logits is not None:
            seen[input_ids.shape[1]] = logits[0].detach().numpy().copy()
        return tokens, logits

    with mock.patch.object(kind, "get_candidates", telling), torch.no_grad():
        text = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0, **how
        )
    return Rounds(text[0, len(prompt) :].tolist(), seen)


def difference(found: Rounds, wanted: Rounds) -> tuple[int, float]:
    """Of the rounds that both had: how many there were, and the largest difference of two logits, over the largest logit of
    the round. A round of a text that is nearly done may have fewer drafts. Tokens that a drafter does not know are -inf in
    both."""
    both = sorted(found.logits.keys() & wanted.logits.keys())
    pairs = [(found.logits[n][: len(wanted.logits[n])], wanted.logits[n]) for n in both]
    return len(both), max(_apart(a, b) for a, b in pairs)


def _apart(found: np.ndarray, wanted: np.ndarray) -> float:
    known = np.isfinite(wanted)
    assert (known == np.isfinite(found)).all()
    return float(np.abs(found[known] - wanted[known]).max() / np.abs(wanted[known]).max())
