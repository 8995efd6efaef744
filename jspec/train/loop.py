"""The training loop: AdamW over random windows of a corpus that lies on the device, keeping the best held-out weights.

Params are flat dicts of fp32 master weights under dotted names. A loss is a function

    loss(params, frozen, windows, key) -> float32 []

of windows int32 ``[B, T + 1]``, T tokens to read and one that follows; ``frozen`` is any pytree that is not trained.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jspec._arguments import is_int, is_number, require

Params = Mapping[str, jax.Array]
Loss = Callable[[Params, Any, jax.Array, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one model is trained.

    Attributes:
      steps: updates.
      peak_rate: learning rate after the warm-up.
      weight_decay: decoupled, of matrices only.
      tokens_per_step: tokens of a batch, rounded down to whole windows.
      length: tokens a window.
      warm_up: steps of rising rate, at most a tenth of all.
      evaluate_every: steps between two evaluations.
      clip: largest norm of a gradient.
    """

    steps: int
    peak_rate: float
    weight_decay: float
    tokens_per_step: int = 32 * 1024
    length: int = 1024
    warm_up: int = 200
    evaluate_every: int = 250
    clip: float = 1.0

    def __post_init__(self):
        for name in ("steps", "length", "evaluate_every"):
            value = getattr(self, name)
            require(is_int(value) and value >= 1, name, value, "an integer of at least 1")
        require(is_number(self.peak_rate) and self.peak_rate > 0, "peak_rate", self.peak_rate, "a positive number")
        decay = self.weight_decay
        require(is_number(decay) and decay >= 0, "weight_decay", decay, "a number of at least 0")
        fits = self.tokens_per_step >= self.length
        require(fits, "tokens_per_step", self.tokens_per_step, f"a window, {self.length}, or more")

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T) of a step's windows."""
        return self.tokens_per_step // self.length, self.length

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW (Loshchilov and Hutter, 2019), warmed up, then a cosine to zero; norms are not decayed."""
        warm_up = min(self.warm_up, self.steps // 10)
        rate = optax.warmup_cosine_decay_schedule(0.0, self.peak_rate, warm_up, self.steps)
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=self.weight_decay, mask=_is_matrix),
        )


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """One row of the training log; losses in nats per token."""

    step: int
    seconds: float
    train_loss: float
    held_out_loss: float


class TrainState(NamedTuple):
    """Everything that a run goes on from.

    Attributes:
      step: updates made so far.
      seconds: that they took, evaluations included.
      params: fp32 master weights.
      moments: of the optimizer.
      key: of the run; a step's noise is keyed by it and the step's number.
      best: the weights whose held-out loss was lowest.
      lowest: that loss.
    """

    step: int
    seconds: float
    params: Params
    moments: Any
    key: jax.Array
    best: Params
    lowest: float


class Store(Protocol):
    """Where states are kept: ``jspec.train.checkpoints.Checkpoints``."""

    def latest(self, like: TrainState) -> TrainState | None: ...

    def save(self, state: TrainState) -> None: ...


def _is_matrix(params: Params) -> dict[str, bool]:
    return {name: weight.ndim > 1 for name, weight in params.items()}


def draw_windows(tokens, key, shape: tuple[int, int]) -> jax.Array:
    """int32 ``[B, T + 1]``: B windows that start anywhere in ``tokens``, integers ``[N]`` on the device."""
    batch, length = shape
    starts = jax.random.randint(key, (batch, 1), 0, tokens.shape[0] - length)
    return tokens[starts + jnp.arange(length + 1)[None]].astype(jnp.int32)


def make_step(loss: Loss, optimizer: optax.GradientTransformation) -> Callable:
    """``step(params, moments, frozen, tokens, keys, shape=(B, T)) -> params, moments, loss``; donates the first two.

    The first of two ``keys`` is that of the windows, the other that of the loss's noise.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="shape")
    def step(params, moments, frozen, tokens, keys, *, shape):
        key_of_windows, key_of_noise = keys
        windows = draw_windows(tokens, key_of_windows, shape)
        value, gradient = jax.value_and_grad(loss)(params, frozen, windows, key_of_noise)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return step


def over_held_out(measure: Loss, tokens: np.ndarray, shape: tuple[int, int]) -> Callable:
    """``mean(params, frozen)`` of ``measure(params, frozen, windows, key)`` over ``tokens``, in windows end to end.

    The keys are the same in every call.

    Raises:
      ValueError: ``tokens`` does not fill one batch of windows.
    """
    batch, length = shape
    count = (len(tokens) - 1) // (batch * length)
    if count == 0:
        raise ValueError(f"{len(tokens)} held-out tokens do not fill a batch of {batch} windows of {length} tokens")
    reach = np.arange(count * batch)[:, None] * length + np.arange(length + 1)[None]
    batches = jnp.asarray(tokens[reach].astype(np.int32)).reshape(count, batch, length + 1)
    keys = jax.random.split(jax.random.key(0), count)
    one = jax.jit(measure)

    def mean(params, frozen):
        parts = [one(params, frozen, windows, key) for windows, key in zip(batches, keys, strict=True)]
        return jax.tree.map(lambda *values: float(np.mean(values)), *parts)

    return mean


def fit(
    plan: Plan,
    loss: Loss,
    held_out: Callable,
    params: Params,
    frozen: Any,
    tokens: jax.Array,
    key: jax.Array,
    report: Callable[[TrainingProgress, Params], None],
    store: Store | None = None,
) -> Params:
    """Train, and return the weights whose held-out loss was lowest.

    Args:
      plan: for how long, and how.
      loss: what is minimised.
      held_out: ``held_out(params, frozen)``, a loss.
      params: where to start; donated to the first step.
      frozen: what ``loss`` and ``held_out`` need beside them.
      tokens: integers ``[N]`` on the device.
      key: of the windows and of the loss's noise.
      report: ``report(progress, params)`` sees every evaluation.
      store: keeps the state of every evaluation; a run that finds one there goes on from it, with the same numbers as
        if it had never stopped.

    Raises:
      FloatingPointError: the held-out loss is not finite.
    """
    optimizer = plan.optimizer()
    step = make_step(loss, optimizer)
    state = TrainState(0, 0.0, params, optimizer.init(params), key, params, math.inf)
    state = (None if store is None else store.latest(state)) or state
    _, earlier, params, moments, key, best, lowest = state
    noise = jax.random.fold_in(key, plan.steps)  # a number that no step has
    recent, started = [], time.perf_counter()
    for index in tqdm(range(state.step, plan.steps), initial=state.step, total=plan.steps, unit="step", disable=None):
        keys = jax.random.fold_in(key, index), jax.random.fold_in(noise, index)
        params, moments, value = step(params, moments, frozen, tokens, keys, shape=plan.shape)
        recent.append(value)
        done = index + 1
        if done % plan.evaluate_every and done != plan.steps:
            continue
        train_loss, held_out_loss = float(np.mean(recent)), held_out(params, frozen)
        seconds = earlier + time.perf_counter() - started
        report(TrainingProgress(done, seconds, train_loss, held_out_loss), params)
        if not math.isfinite(held_out_loss):
            raise FloatingPointError(f"held-out loss {held_out_loss} at step {done}: lower the learning rate")
        recent = []
        if held_out_loss < lowest:
            lowest, best = held_out_loss, jax.tree.map(jnp.copy, params)
        if store is not None:
            store.save(TrainState(done, seconds, params, moments, key, best, lowest))
    return best
