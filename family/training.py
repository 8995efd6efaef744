"""The training loop: AdamW over random windows of a corpus that lies on the device, keeping the best held-out weights."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from family.objectives import Params
from jspec._arguments import require
from jspec.config import ModelConfig
from jspec.models import Decoder, flat_params


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one model is trained."""

    steps: int
    peak_rate: float
    weight_decay: float
    tokens_per_step: int = 32 * 1024
    length: int = 1024
    warm_up: int = 200
    evaluate_every: int = 250

    def __post_init__(self):
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
            optax.clip_by_global_norm(1.0),
            optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=self.weight_decay, mask=_is_matrix),
        )


@dataclasses.dataclass(frozen=True)
class Progress:
    """One row of the training log; losses in nats per token."""

    step: int
    seconds: float
    train_loss: float
    held_out_loss: float


def _is_matrix(params: Params) -> dict[str, bool]:
    return {name: weight.ndim > 1 for name, weight in params.items()}


def initial_params(config: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
    """fp32 weights; what is added to the residual stream is scaled down by its 2L additions (Radford et al., 2019)."""
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(key))
    damped = (".out.weight", ".down.weight")
    scale = (2 * config.num_layers) ** -0.5
    return {name: w * scale if name.endswith(damped) else w for name, w in flat_params(model).items()}


def draw_windows(tokens, key, shape: tuple[int, int]) -> jax.Array:
    """int32 ``[B, T + 1]``: B windows that start anywhere in ``tokens`` (uint16, on the device)."""
    batch, length = shape
    starts = jax.random.randint(key, (batch, 1), 0, tokens.shape[0] - length)
    return tokens[starts + jnp.arange(length + 1)[None]].astype(jnp.int32)


def make_step(loss: Callable, optimizer: optax.GradientTransformation) -> Callable:
    """``step(params, moments, teacher, tokens, key, shape=(B, T)) -> params, moments, loss``; donates the first two."""

    @functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="shape")
    def step(params, moments, teacher, tokens, key, *, shape):
        value, gradient = jax.value_and_grad(loss)(params, teacher, draw_windows(tokens, key, shape))
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return step


def over_held_out(measure: Callable, tokens: np.ndarray, shape: tuple[int, int]) -> Callable:
    """``mean(params, teacher)`` of ``measure(params, teacher, windows)`` over ``tokens``, in windows end to end.

    Raises:
      ValueError: ``tokens`` does not fill one batch of windows.
    """
    batch, length = shape
    count = (len(tokens) - 1) // (batch * length)
    if count == 0:
        raise ValueError(f"{len(tokens)} held-out tokens do not fill a batch of {batch} windows of {length} tokens")
    reach = np.arange(count * batch)[:, None] * length + np.arange(length + 1)[None]
    batches = jnp.asarray(tokens[reach].astype(np.int32)).reshape(count, batch, length + 1)
    one = jax.jit(measure)

    def mean(params, teacher):
        parts = [one(params, teacher, windows) for windows in batches]
        return jax.tree.map(lambda *values: float(np.mean(values)), *parts)

    return mean


def fit(plan: Plan, loss: Callable, held_out: Callable, params, teacher, tokens, key, report: Callable):
    """Train, and return the weights whose held-out loss was lowest; ``report(progress)`` sees every evaluation.

    ``params`` are donated to the first step.

    Raises:
      FloatingPointError: the held-out loss is not finite.
    """
    optimizer = plan.optimizer()
    step, moments = make_step(loss, optimizer), optimizer.init(params)
    best, lowest, recent, started = params, math.inf, [], time.perf_counter()
    for index in range(plan.steps):
        key_of_step = jax.random.fold_in(key, index)
        params, moments, value = step(params, moments, teacher, tokens, key_of_step, shape=plan.shape)
        recent.append(value)
        last = index + 1 == plan.steps
        if (index + 1) % plan.evaluate_every == 0 or last:
            train_loss, held_out_loss = float(np.mean(recent)), held_out(params, teacher)
            report(Progress(index + 1, time.perf_counter() - started, train_loss, held_out_loss))
            if not math.isfinite(held_out_loss):
                raise FloatingPointError(f"held-out loss {held_out_loss} at step {index + 1}: lower the learning rate")
            recent = []
            if held_out_loss < lowest:
                lowest, best = held_out_loss, jax.tree.map(jnp.copy, params)
    return best
