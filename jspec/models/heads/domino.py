"""What a Domino head (2026) adds to a DFlash head: a recurrence over the drafts of a block, which corrects their logits.

Slot i makes draft i. Let h_i be its hidden state after the final norm, u_i its logits, e_0 the target's embedding of the
anchor and e_i that of draft i - 1. A gated recurrent unit (Cho et al., 2014) reads them in order, from a state s of zeros:

    r, z = sigmoid(Wr e_i + Ur s), sigmoid(Wz e_i + Uz s)
    s_i = (1 - z) tanh(Wn e_i + r (Un s)) + z s

and draft i has the logits u_i + O silu(P [h_i, s_i]), but for the first ``DominoConfig.uncorrected``, which have u_i.

Source: nvidia-modelopt 0.48.0rc1, ``HFDominoModel._apply_domino_head``, where text stands for the drafts."""

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import BlockConfig
from jspec.models.heads.sequential import Slots
from jspec.models.layers import linear_maps


class Domino(nnx.Module):
    """The recurrence: ``of_token`` is W, ``of_state`` U, of gates r, z and n in this order, ``inner`` P and ``out`` O."""

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        D, domino = config.layers.hidden_size, config.domino
        assert domino is not None
        self.size, self.uncorrected = domino.state_size, domino.uncorrected
        linear = linear_maps(config.layers, "domino.", dtype=dtype, rngs=rngs)
        self.of_token = linear("of_token", D, 3 * self.size)
        self.of_state = linear("of_state", self.size, 3 * self.size)
        self.inner = linear("inner", D + self.size, domino.inner_size)
        self.out = linear("out", domino.inner_size, config.draft_vocab_size)

    def start(self, slots: Slots):
        """See ``jspec.models.heads.sequential``."""

        def read(state, previous, i: int):
            tokens = jnp.split(self.of_token(slots.embed(previous)), 3, axis=-1)
            states = jnp.split(self.of_state(state), 3, axis=-1)
            reset, keep = (jax.nn.sigmoid(x + y) for x, y in zip(tokens[:2], states[:2], strict=True))
            state = ((1 - keep) * jnp.tanh(tokens[2] + reset * states[2]) + keep * state).astype(state.dtype)
            hidden, logits = (x[:, i : i + 1] for x in (slots.hidden, slots.logits))
            if i >= self.uncorrected:
                logits = logits + self.out(jax.nn.silu(self.inner(jnp.concatenate([hidden, state], axis=-1))))
            return state, logits

        return jnp.zeros((len(slots.hidden), 1, self.size), slots.hidden.dtype), read
