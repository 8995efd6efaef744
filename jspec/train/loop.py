"""The training loop: AdamW on random windows of a corpus; it returns the weights with the lowest held-out loss.

The whole corpus lies on the device, so a step draws its windows without copying tokens from the host. Params are flat
dicts from dotted names to fp32 master weights. A loss is a function

    loss(params, frozen, windows, key) -> float32 []

where ``frozen`` is any pytree that the loss needs and that is not trained (the target's weights, for example),
``windows`` is int32 ``[B, T + 1]`` and ``key`` seeds the loss's own noise. Tokens 0 to T - 1 of a window are the
model's input; tokens 1 to T are the next tokens that it predicts.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jspec._validation import is_int, is_number, require
from jspec.train.checkpoints import Checkpoints, TrainState

Params = Mapping[str, jax.Array]
Loss = Callable[[Params, Any, jax.Array, jax.Array], Any]  # a measure that is only reported may return a pytree


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The optimizer, the batch size and the number of steps with which one model is trained.

    Attributes:
      steps: number of optimizer updates.
      peak_rate: learning rate at the end of the warm-up, the highest of the run.
      weight_decay: AdamW's decoupled weight decay. It applies to matrices, not to vectors such as norm weights.
      tokens_per_step: tokens in the batch of one step. It is rounded down to a whole number of windows.
      length: T, the tokens of one window.
      warm_up: number of steps over which the learning rate rises from zero. At most a tenth of ``steps`` is used.
      evaluate_every: number of steps between two evaluations on held-out data.
      clip: gradients with a larger global norm are scaled down to this norm.

    Example::

        plan = TrainingPlan(steps=4000, peak_rate=1e-3, weight_decay=0.1, tokens_per_step=32768, length=1024)
        assert plan.batch_shape == (32, 1024)
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
    def batch_shape(self) -> tuple[int, int]:
        """(B, T): how many windows a step trains on, and how many tokens each has."""
        return self.tokens_per_step // self.length, self.length

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW (Loshchilov and Hutter, 2019). Its learning rate rises linearly, then falls to zero along a cosine."""
        warm_up = min(self.warm_up, self.steps // 10)
        rate = optax.warmup_cosine_decay_schedule(0.0, self.peak_rate, warm_up, self.steps)
        return adamw(rate, self.weight_decay, self.clip)


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """The result of one evaluation during training.

    Attributes:
      step: number of updates made so far.
      seconds: wall time that they took, evaluations included.
      train_loss: mean loss of the steps since the last evaluation, in nats per token if the loss is a cross-entropy.
      held_out_loss: mean loss on the held-out data, in the same unit.
    """

    step: int
    seconds: float
    train_loss: float
    held_out_loss: float


def adamw(rate: optax.ScalarOrSchedule, weight_decay: float, clip: float = 1.0) -> optax.GradientTransformation:
    """AdamW as heads are trained with it; arguments as of ``TrainingPlan``."""
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_is_matrix),
    )


def _is_matrix(params: Params) -> dict[str, bool]:
    return {name: weight.ndim > 1 for name, weight in params.items()}


def draw_windows(tokens, key, batch_shape: tuple[int, int]) -> jax.Array:
    """Random windows of a text, int32 ``[B, T + 1]``.

    Args:
      tokens: integers ``[N]`` on the device, the text.
      key: seeds the B positions where the windows start, each drawn uniformly from those with T tokens after them.
      batch_shape: (B, T).
    """
    batch, length = batch_shape
    starts = jax.random.randint(key, (batch, 1), 0, tokens.shape[0] - length)
    return tokens[starts + jnp.arange(length + 1)[None]].astype(jnp.int32)


def make_step(loss: Loss, optimizer: optax.GradientTransformation, draw: Callable = draw_windows) -> Callable:
    """A compiled function that makes one update on the windows that ``draw(tokens, key, batch_shape)`` draws.

    It is called as

        params, opt_state, value = step(params, opt_state, frozen, tokens, keys, batch_shape=(B, T))

    with ``tokens`` integers ``[N]`` on the device and two ``keys``: the first draws the windows, the second is passed
    to the loss. ``params`` and ``opt_state`` are donated. ``value`` is the loss before the update.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="batch_shape")
    def step(params, opt_state, frozen, tokens, keys, *, batch_shape):
        window_key, noise_key = keys
        windows = draw(tokens, window_key, batch_shape)
        value, gradient = jax.value_and_grad(loss)(params, frozen, windows, noise_key)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def make_evaluator(measure: Loss, tokens: np.ndarray, batch_shape: tuple[int, int]) -> Callable:
    """A function ``evaluate(params, frozen)`` that returns the mean of ``measure`` over a held-out text.

    The text is cut into consecutive windows, so that each of its tokens but the first is predicted once. Tokens at the
    end that do not fill a batch are left out. Every call passes the same keys to ``measure``, so that the noise of a loss
    does not blur the comparison of two calls.

    Args:
      measure: a loss, or a function with a loss's arguments that returns a pytree of scalars.
      tokens: integers ``[N]`` on the host, the text.
      batch_shape: (B, T) of the windows.

    Raises:
      ValueError: ``tokens`` does not fill one batch of windows.
    """
    batch, length = batch_shape
    count = (len(tokens) - 1) // (batch * length)
    if count == 0:
        raise ValueError(f"{len(tokens)} held-out tokens do not fill a batch of {batch} windows of {length} tokens")
    indices = np.arange(count * batch)[:, None] * length + np.arange(length + 1)[None]  # [count * B, T + 1]
    batches = jnp.asarray(tokens[indices].astype(np.int32)).reshape(count, batch, length + 1)
    keys = jax.random.split(jax.random.key(0), count)
    measure_batch = jax.jit(measure)

    def evaluate(params, frozen):
        results = [measure_batch(params, frozen, windows, key) for windows, key in zip(batches, keys, strict=True)]
        return jax.tree.map(lambda *values: float(np.mean(values)), *results)

    return evaluate


def fit(
    plan: TrainingPlan,
    loss: Loss,
    evaluate: Callable,
    params: Params,
    frozen: Any,
    tokens: jax.Array,
    key: jax.Array,
    report: Callable[[TrainingProgress, Params], None],
    store: Checkpoints | None = None,
    place: Callable[[Any], Any] = lambda tree: tree,
) -> Params:
    """Train a model, and return the weights that had the lowest held-out loss.

    Args:
      plan: number of steps, batch size and optimizer.
      loss: the function that is minimised.
      evaluate: ``evaluate(params, frozen)`` returns the held-out loss as a float; see ``make_evaluator``.
      params: the initial fp32 weights. They are donated to the first step.
      frozen: the pytree that ``loss`` and ``evaluate`` take beside the params.
      tokens: integers ``[N]`` on the device, the training text.
      key: seeds the windows and the loss's noise.
      report: ``report(progress, params)`` is called after every evaluation.
      store: keeps the state after every evaluation. If it already holds a state, training continues from there, with
        the same numbers as if it had never stopped.
      place: puts a pytree of arrays on the devices on which ``params``, ``tokens`` and ``key`` are.

    Raises:
      FloatingPointError: the held-out loss is not finite.
    """
    optimizer = plan.optimizer()
    step = make_step(loss, optimizer)
    state = TrainState(0, 0.0, params, place(optimizer.init(params)), key, params, math.inf)
    state = (None if store is None else store.latest(state)) or state
    _, earlier_seconds, params, opt_state, key, best_params, lowest_loss = state
    # Step i draws its windows from fold_in(key, i). Steps are numbered 0 .. plan.steps - 1, so this key is none of theirs.
    noise_key = jax.random.fold_in(key, plan.steps)
    recent, started = [], time.perf_counter()
    for index in tqdm(range(state.step, plan.steps), initial=state.step, total=plan.steps, unit="step", disable=None):
        keys = jax.random.fold_in(key, index), jax.random.fold_in(noise_key, index)
        params, opt_state, value = step(params, opt_state, frozen, tokens, keys, batch_shape=plan.batch_shape)
        recent.append(value)
        done = index + 1
        if done % plan.evaluate_every and done != plan.steps:
            continue
        train_loss, held_out_loss = float(np.mean(recent)), evaluate(params, frozen)
        seconds = earlier_seconds + time.perf_counter() - started
        report(TrainingProgress(done, seconds, train_loss, held_out_loss), params)
        if not math.isfinite(held_out_loss):
            raise FloatingPointError(f"held-out loss {held_out_loss} at step {done}: lower the learning rate")
        recent = []
        if held_out_loss < lowest_loss:
            lowest_loss, best_params = held_out_loss, jax.tree.map(jnp.copy, params)  # the next step donates params
        if store is not None:
            store.save(TrainState(done, seconds, params, opt_state, key, best_params, lowest_loss))
    return best_params
