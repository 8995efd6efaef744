"""The key of every draw: a function of the request's key and the place of the draw, without state.

``SAMPLE`` noise belongs to an absolute position: every draw of the token at that position with that request key uses the
same noise, for any drafts before it. The other streams belong to a round, which is identified by the committed length at its
start. At most one round starts at a length, so no word of noise is used twice: neither in a later round, nor by the accept
test after the draft. To share a stream between draft and residual, or to key the accept noise of ``block`` by position,
would break losslessness silently.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from jspec.pallas.sampling.threefry import threefry, threefry_bits, threefry_unrolled, uniform_of_bits


class Stream(enum.IntEnum):
    """What a word of noise is used for; each use has a stream of its own.

    Example::

        key = draw_key((jnp.uint32(0), jnp.uint32(7)), Stream.ACCEPT, jnp.int32(10), jnp.int32(0))  # two words
    """

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def draw_key(words, stream: Stream, position, index, in_kernel: bool = False) -> tuple:
    """The two words of the Threefry key of one draw, uint32.

    Position takes 22 bits of the counter, index 8 and stream 2: see ``MAX_POSITIONS`` and ``MAX_DRAFTS`` in ``config``.

    Args:
      words: the two words of the request's key, uint32.
      stream: what the draw is for.
      position: int32, an absolute position, or the committed length when the round began.
      index: int32, the place in the block of drafts.
      in_kernel: whether the key is computed inside a kernel.
    """
    counter = (position.astype(jnp.uint32) << 10) | (index.astype(jnp.uint32) << 2) | jnp.uint32(stream)
    key_0, key_1 = words
    return (threefry_unrolled if in_kernel else threefry)(key_0, key_1, counter)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundNoise:
    """The noise of one round.

    Attributes:
      key_data: uint32 ``[B, 2]``, the requests' keys.
      length: int32 ``[B]``, committed tokens when the round began, which is the position of the next token.
      in_kernel: whether keys are computed inside a kernel.

    Example::

        noise = RoundNoise(key_data=jnp.array([[0, 7]], jnp.uint32), length=jnp.array([10]))
        uniforms = noise.accept_uniforms(4)  # [1, 4], the same in every batch and in any order
    """

    key_data: jax.Array
    length: jax.Array
    in_kernel: bool = dataclasses.field(default=False, metadata={"static": True})

    def sample_keys(self, offset) -> jax.Array:
        """Keys of the target's own draws at positions length + offset: int32 ``[B, J]`` -> uint32 ``[B, J, 2]``."""
        return jnp.stack(self._of_rows().sample_key(offset), axis=-1)

    def draft_keys(self, index) -> jax.Array:
        """Keys of draft draws: int32 ``[B, J]`` -> uint32 ``[B, J, 2]``."""
        return jnp.stack(self._of_rows().draft_key(index), axis=-1)

    def accept_uniforms(self, K: int) -> jax.Array:
        """Uniforms of the accept tests, float32 ``[B, K]`` in (0, 1)."""
        index = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (self.length.shape[0], K))
        # As two arrays, the words need no kernel that stacks them.
        key_0, key_1 = self._of_rows()._round_key(Stream.ACCEPT, index)
        return uniform_of_bits(threefry_bits(key_0, key_1, jnp.uint32(0)))

    def last_key(self, accepted, count) -> tuple:
        """The two words of the key of a round's last draw: of its recovered token or of its bonus token.

        Args:
          accepted: int32 ``[B]``, how many drafts stand.
          count: int32 ``[B]``, how many were valid; if all of them stand, the last token is the bonus token.
        """
        recovered, sampled = self.residual_key(accepted), self.sample_key(accepted)
        return tuple(jnp.where(accepted < count, *words) for words in zip(recovered, sampled, strict=True))

    def of_request(self, b) -> "RoundNoise":
        """In a kernel, of refs: the noise of one request, with scalars in place of arrays."""
        column = jnp.int32(0)  # a literal index does not trace in interpret mode of jax 0.10
        words = self.key_data[b, column], self.key_data[b, column + 1]
        return dataclasses.replace(self, key_data=words, length=self.length[b], in_kernel=True)

    def of_requests(self) -> "RoundNoise":
        """The noise with the two words of every key as separate arrays, each ``[B]``."""
        return dataclasses.replace(self, key_data=(self.key_data[:, 0], self.key_data[:, 1]))

    def _of_rows(self) -> "RoundNoise":
        words = self.of_requests().key_data
        return dataclasses.replace(self, key_data=tuple(x[:, None] for x in words), length=self.length[:, None])

    # The methods below are for noise whose key words are apart (``of_requests``), of any shapes that broadcast.

    def sample_key(self, offset) -> tuple:
        return draw_key(self.key_data, Stream.SAMPLE, self.length + offset, jnp.zeros_like(offset), self.in_kernel)

    def draft_key(self, index) -> tuple:
        return self._round_key(Stream.DRAFT, index)

    def residual_key(self, index) -> tuple:
        return self._round_key(Stream.RESIDUAL, index)

    def _round_key(self, stream: Stream, index) -> tuple:
        return draw_key(self.key_data, stream, self.length, index, self.in_kernel)
