"""``OnPolicyTrainer``: keeps the draft head of an LLM young while reinforcement learning changes its target.

Every update of the target makes its draft head a little older, and fewer drafts are accepted. The rollouts are what the
head would have to draft, so it learns from them: from the target's distributions at their tokens, with the weights that the
target has now. The law of a text does not depend on the head, so no rollout has to wait for it.
"""

import dataclasses
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec._validation import is_int, is_number, require
from jspec.config import ModelConfig
from jspec.llm import LLM
from jspec.models import build_head
from jspec.models.flatten import flatten
from jspec.outputs import Result
from jspec.registry import MTP, entry_of, resolve, trained
from jspec.train.data_parallel import loss_beside
from jspec.train.initial_weights import FullVocabulary
from jspec.train.loop import adamw, make_step
from jspec.train.methods import Sizes
from jspec.train.objectives import Objective

LONGEST_WINDOW = 1024  # unless the caller says otherwise
PADDING = ~0  # behind the end of a text: a token that does not count


class OnPolicyTrainer:
    """Trains the draft head of an LLM on the texts that it generates, and hands it back to the engine.

    It keeps float32 weights of the head and two moments of Adam on the devices of the model, 12 bytes a parameter. From its
    first step on, what drafts is made of these. Everything is compiled when it is made, and nothing in a step. Any thread
    may call ``step``, while others generate.

    Args:
      llm: drafts by a head that ``jspec train`` can train, whose weights are not quantised.
      learning_rate: of AdamW.
      tokens_per_step: how many tokens a step reads, padding included. They are rounded down to whole windows, which are
        drawn from those of all texts.
      length: T, the tokens of a window, which has one text or a part of one. None takes the longest text that the engine
        has room for, but at most 1024. Texts that are much shorter waste the rest.
      wait: whether the new weights wait until requests under way have ended. If not, these go on with the new weights, and
        their ``Result.reproducible`` is False where drafts decide what text a seed means.
      seed: seeds which windows are drawn, and the noise of the objective.

    Raises:
      ValueError: the LLM does not draft by such a head, or a value is out of range. The message names it.
      RuntimeError: the model is asleep or closed, or its weights are incomplete.

    Example::

        from jspec.train import OnPolicyTrainer

        llm = jspec.load("path/to/target", draft="path/to/draft")
        trainer = OnPolicyTrainer(llm, learning_rate=1e-4, tokens_per_step=512, length=128)
        rollouts = llm.generate(["def main(", "class Queue:"], max_tokens=64)
        print(trainer.step(rollouts))  # the loss; behind each llm.update_weights(...)
    """

    def __init__(
        self,
        llm: LLM,
        *,
        learning_rate: float = 1e-4,
        tokens_per_step: int = 8192,
        length: int | None = None,
        wait: bool = False,
        seed: int = 0,
    ):
        require(isinstance(llm, LLM), "llm", llm, "an LLM, as jspec.load returns it")
        methods, rate = trained(), learning_rate
        require(llm.method in methods, "llm.method", llm.method, f"a draft head of one of {', '.join(methods)}")
        require(is_number(rate) and rate > 0, "learning_rate", rate, "a positive number")
        self._llm, self._weights, self._wait = llm, llm._weights, wait
        self._rng, self._one = np.random.default_rng(seed), threading.Lock()
        config, held = self._weights.head()
        objective = objective_of(config, llm.target.config, llm.engine.runner.num_draft_tokens)
        self._shape = _batch_shape(llm, tokens_per_step, length, objective.depths + 2)
        self._constants = {name: held[name] for name in held if name == "draft_ids"}
        own = {name: held[name] for name in config.param_shapes() if name not in self._constants}
        optimizer = optax.apply_if_finite(adamw(rate, weight_decay=0.0), max_consecutive_errors=2**31 - 1)
        self._params = jax.jit(lambda own: {name: x.astype(jnp.float32) for name, x in own.items()})(own)
        self._state = jax.jit(optimizer.init)(self._params)
        dtype = llm.engine.config.dtype

        def served(params, constants):
            head = build_head(config, {**params, **constants}, dtype).prepare()
            return flatten(head).leaves

        self._served = jax.jit(served).lower(self._params, self._constants).compile()
        step: Any = make_step(loss_beside(objective, llm.target, dtype), optimizer, draw=lambda windows, *_: windows)
        # For the places of the arrays: a call would compile anew behind an update, which commits arrays to their places.
        with self._weights.standing() as leaves:
            args = self._args(leaves, np.full((self._shape[0], self._shape[1] + 1), PADDING, np.int32))
            self._update = step.lower(*args, batch_shape=self._shape).compile()

    def step(self, results: Result | Iterable[Result | Sequence[Result]]) -> float:
        """Update the head's weights on the texts of these results, and have the engine draft with the new ones.

        Args:
          results: of ``llm.generate``, with the lists that it has for ``n`` above 1. Tokens of their prompts are read, and
            those of their completions learnt. Results without new tokens are left out.

        Returns:
          the loss before the update.

        Raises:
          ValueError: no result has tokens that the head could have drafted.
          FloatingPointError: the loss or its gradient is not finite. The head stays as it was, here and in the engine.
          RuntimeError: the model is asleep or closed, or its weights are incomplete.
        """
        rows = windows_of(results, self._shape[1])
        with self._one:
            windows = self._rng.permutation(rows)[: self._shape[0]]
            windows = np.pad(windows, ((0, self._shape[0] - len(windows)), (0, 0)), constant_values=PADDING)
            with self._weights.standing() as leaves:
                self._params, self._state, value = self._update(*self._args(leaves, windows))
                new, loss = self._served(self._params, self._constants), float(value)
                jax.block_until_ready(new)  # from here on, the target's arrays may be written over
            if not (math.isfinite(loss) and bool(self._state.last_finite)):
                raise FloatingPointError(f"loss {loss} of the draft head, which stays as it was: lower learning_rate")
            self._llm.engine.replace_draft(new, self._wait)
        return loss

    def _args(self, leaves: list[jax.Array], windows: np.ndarray) -> tuple:
        """The arguments of the next update."""
        noise = jax.random.key(self._rng.integers(2**31))
        return self._params, self._state, (leaves, self._constants), windows, (noise, noise)


def _batch_shape(llm: LLM, tokens_per_step: int, length: int | None, shortest: int) -> tuple[int, int]:
    """How many windows a step reads, and T."""
    require(is_int(tokens_per_step), "tokens_per_step", tokens_per_step, "an integer")
    longest, shards = llm.target.config.max_position, getattr(llm.target, "shards", None)
    length = min(llm.engine.config.max_len, LONGEST_WINDOW, tokens_per_step) if length is None else length
    fits = is_int(length) and shortest <= length <= longest
    require(fits, "length", length, f"an integer in {shortest}..{longest}, the target's positions")
    windows, devices = tokens_per_step // length, 1 if shards is None else shards.count
    told = f"{devices} windows of {length} tokens, or a multiple of that"
    require(windows >= 1 and windows % devices == 0, "tokens_per_step", tokens_per_step, told)
    return windows, length


def windows_of(results: Result | Iterable[Result | Sequence[Result]], length: int) -> np.ndarray:
    """Windows of texts, int32 ``[N, length + 1]``, in which tokens that do not count are stored as their complements: those
    of prompts, and padding. A text that is longer than a window goes on in the next one, with its last token again.

    Raises:
      ValueError: no result has a token to learn.
    """
    given, windows = [results] if isinstance(results, Result) else results, []
    for result in [one for some in given for one in (some if isinstance(some, Sequence) else [some])]:
        require(isinstance(result, Result), "results", result, "results of llm.generate, or lists of them")
        text = np.array([*(~token for token in result.prompt_token_ids), *result.token_ids], np.int32)
        for begin in range(0, len(text), length):
            window = text[begin : begin + length + 1]
            if (window[2:] >= 0).any():  # a head drafts none of the first two tokens
                windows.append(np.pad(window, (0, length + 1 - len(window)), constant_values=PADDING))
    require(bool(windows), "results", results, "some with new tokens behind the second of their text")
    return np.stack(windows)


def objective_of(config: Any, target: ModelConfig, num_draft_tokens: int) -> Objective:
    """The objective of a head that exists, which learns ``num_draft_tokens`` drafts unless its config has their number.

    Raises:
      ValueError: it cannot be trained.
    """
    of_method = entry_of(config).objective
    made: Any = of_method and resolve(of_method)(target, Sizes(num_draft_tokens=num_draft_tokens))
    reasons = {
        "it is a whole language model": made is None,
        f"its weights are stored in {config.formats}": bool(config.formats),
        "its candidate selector is not trained": getattr(config, "is_dflash2", False),
        "it has a layer for each draft": config.method == MTP and config.layers.num_layers > 1,
        "it has a part of the target's output head": config.reduced and type(made).known is FullVocabulary.known,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ValueError(f"llm drafts by a {config.method} checkpoint that cannot be trained here: {reason}")
    fields = {"config": config, "aux_layers": None, "confidence": 0.0}
    if hasattr(config, "resolved_aux_layers"):
        fields["aux_layers"] = config.resolved_aux_layers(target)
    if getattr(config, "confidence", None) is not None:
        fields["confidence"] = made.confidence
    return dataclasses.replace(made, **{name: fields[name] for name in made.__dataclass_fields__ if name in fields})
