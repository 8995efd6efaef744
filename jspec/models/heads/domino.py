"""What a Domino head (2026) adds to a DFlash head: a recurrence over the drafts of a block, which corrects their logits.

Slot i of the block makes draft i. Let h_i be its hidden state after the final norm, u_i its logits, e_0 the embedding of
the anchor and e_i that of draft i - 1, by the target's embedding. A gated recurrent unit (Cho et al., 2014) without biases
reads them one after another, from a state of zeros:

    r, z = sigmoid(Wr e_i + Ur s), sigmoid(Wz e_i + Uz s)
    s_i = (1 - z) tanh(Wn e_i + r (Un s)) + z s                      # s is the state before

and draft i has the logits u_i + O silu(P [h_i, s_i]), but for the first ``DominoConfig.uncorrected``, which have u_i.

Source: nvidia-modelopt 0.48.0rc1, ``HFDominoModel._apply_domino_head``, in which text stands for the drafts. It applies the
correction in training alone."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import BlockConfig
from jspec.models.heads.sequential import Slots
from jspec.models.layers import Linear


class Domino(nnx.Module):
    """A ``Sequential`` of the recurrence.

    Attributes:
      of_token, of_state: W and U, of the gates r, z and n in this order: ``[D] -> [3Ds]`` and ``[Ds] -> [3Ds]``.
      inner: P, ``[D + Ds] -> [Di]``.
      out: O, ``[Di] -> [Vd]``.
    """

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        assert config.domino is not None
        D, self.size, Di = config.layers.hidden_size, config.domino.state_size, config.domino.inner_size
        self.uncorrected = config.domino.uncorrected
        linear = functools.partial(Linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        self.of_token, self.of_state = linear(D, 3 * self.size), linear(self.size, 3 * self.size)
        self.inner, self.out = linear(D + self.size, Di), linear(Di, config.draft_vocab_size)

    def start(self, slots: Slots):
        """See ``Sequential``."""

        def read(state, previous, i: int):
            state, hidden, logits = self._next(slots.embed(previous), state), *(x[:, i : i + 1] for x in slots[:2])
            if i >= self.uncorrected:
                joined = jnp.concatenate([hidden, state.astype(hidden.dtype)], axis=-1)
                logits = logits + self.out(jax.nn.silu(self.inner(joined)))
            return state, logits

        return jnp.zeros((len(slots.hidden), 1, self.size), slots.hidden.dtype), read

    def _next(self, embedded, state):
        """The state ``[B, 1, Ds]`` after one more embedding ``[B, 1, D]``."""
        tokens, states = (jnp.split(x, 3, axis=-1) for x in (self.of_token(embedded), self.of_state(state)))
        reset, keep = (jax.nn.sigmoid(x + y) for x, y in zip(tokens[:2], states[:2], strict=True))
        return (1 - keep) * jnp.tanh(tokens[2] + reset * states[2]) + keep * state
