"""Where noise comes from: a key per draw, computed from the request's key and the place of the draw, never from a counter.

``SAMPLE`` noise belongs to an absolute position: whoever asks for the token at that position with that key gets the same
noise, whatever was drafted on the way. The other streams belong to a round, named by the committed length at its start.
A length starts at most one round, so no word is ever used twice: not in a later round, and not by the accept test after
the draft. Sharing a stream between draft and residual, or keying ``block``'s accept noise by position, breaks
losslessness silently.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from jspec.pallas.noise import threefry, threefry_bits, uniform_of_bits


class Stream(enum.IntEnum):
    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def draw_key(key_data, stream: Stream, position, index):
    """Threefry key of one draw: uint32 ``[B, 2]``, int32 ``[B, J]``, int32 ``[B, J]`` -> uint32 ``[B, J, 2]``.

    The word is position (22 bits), index in the block (8 bits), stream (2 bits): ``config.MAX_POSITIONS``, ``MAX_DRAFTS``.
    """
    return jnp.stack(_key_words(key_data, stream, position, index), axis=-1)


def _key_words(key_data, stream: Stream, position, index):
    """The two words of ``draw_key``, each ``[B, J]``; apart, they need no kernel to be put together."""
    word = (position.astype(jnp.uint32) << 10) | (index.astype(jnp.uint32) << 2) | jnp.uint32(stream)
    return threefry(key_data[:, :1], key_data[:, 1:], word)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundNoise:
    """The noise of one round.

    Attributes:
      key_data: uint32 ``[B, 2]``, the requests' keys.
      length: int32 ``[B]``, committed tokens when the round began, which is the position of the next token.
    """

    key_data: jax.Array
    length: jax.Array

    def sample_keys(self, offset) -> jax.Array:
        """Keys of the target's own draws at positions length + offset: int32 ``[B, J]`` -> uint32 ``[B, J, 2]``."""
        return draw_key(self.key_data, Stream.SAMPLE, self.length[:, None] + offset, jnp.zeros_like(offset))

    def draft_keys(self, index) -> jax.Array:
        """Keys of draft draws: int32 ``[B, J]`` -> uint32 ``[B, J, 2]``."""
        return self._round_keys(Stream.DRAFT, index)

    def residual_keys(self, index) -> jax.Array:
        """Keys of residual draws: int32 ``[B, J]`` -> uint32 ``[B, J, 2]``."""
        return self._round_keys(Stream.RESIDUAL, index)

    def accept_uniforms(self, K: int) -> jax.Array:
        """Uniforms of the accept tests, float32 ``[B, K]`` in (0, 1)."""
        index = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (self.length.shape[0], K))
        key = _key_words(self.key_data, Stream.ACCEPT, jnp.broadcast_to(self.length[:, None], index.shape), index)
        return uniform_of_bits(threefry_bits(*key, jnp.zeros(index.shape, jnp.uint32)))

    def _round_keys(self, stream: Stream, index) -> jax.Array:
        return draw_key(self.key_data, stream, jnp.broadcast_to(self.length[:, None], index.shape), index)
