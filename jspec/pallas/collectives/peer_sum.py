"""A sum over the GPUs of one process with the residual sum and the norm behind it, in one launch.

Every GPU sends its part to all others, in packets, and adds up all parts in the order of the GPUs. So all of them have the
same numbers, bit for bit, and none waits for more than one trip. This is for few tokens: the parts of n GPUs cross n - 1
times, where reduce-scatter and all-gather send each part twice.

An exchange has an epoch, one more than the exchange before; packets of epoch e go into slot e mod 2. Two slots are enough
if every GPU sends to every other one in every epoch: who sends epoch e + 2 has received all of e + 1, which the others
sent after their kernel of e had ended. Epochs never return, however many programs use a workspace. The epoch is an operand
and a result of each sum, so that a program cannot make two of them in another order.

``benchmarks.kernels.sums`` times it beside XLA's sum, which is what models have.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.collectives.packets import PACKET_BYTES, receive, send
from jspec.pallas.collectives.workspace import SLOTS, Peers
from jspec.pallas.norm.rms_norm import norm, scale_in_float32
from jspec.pallas.triton import kernel_call

MOST_BLOCKS = 96  # that wait for those of other GPUs, and so have to run together; an H100 has 132 multiprocessors
_WORDS = (
    64  # of a token that one warp has: 14 us instead of 18 for 80 tokens of 4,096 numbers with half as many threads
)

KINDS = ("rms", "rms_wide", "rms_offset")


def peer_sum_reference(x, y, weight, eps: float, kind: str, axis: str) -> tuple[jax.Array, jax.Array]:
    """``x`` and the sum of ``y`` over a mesh axis, and the norm of that, ``[tokens, D]`` each in the dtype of x.

    The sums are computed in float32 and rounded once. Inside of a ``jax.shard_map``.

    Args:
      x: the residual stream ``[tokens, D]``, the same on every device.
      y: this device's part of what is added to it, ``[tokens, D]``.
      weight: of the norm, ``[D]``.
      eps, kind: as ``norm`` has them.
      axis: of the mesh.
    """
    parts = jax.lax.all_gather(y.astype(jnp.float32), axis)
    new = (x.astype(jnp.float32) + functools.reduce(jnp.add, parts)).astype(x.dtype)
    return new, norm(new, weight, None, eps, kind)


def peer_sum_kernel(
    x, y, weight, peers: Peers, epoch, eps: float, kind: str, words: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``peer_sum_reference`` as a kernel, for bfloat16 and float32; one block has some of the tokens.

    Args:
      x, y, weight, eps, kind: as for ``peer_sum_reference``.
      peers: the other devices' workspaces, and this one's.
      epoch: int32 ``[1]``, the epoch of this exchange.
      words: ``Workspace.words``.

    Returns:
      ``peer_sum_reference``'s results, and the epoch of the next exchange. Where a packet of another GPU does not come,
      the results are NaN.

    Raises:
      ValueError: the workspace is too small.
    """
    return _launch(x, y, weight, *peers, epoch, None, eps, kind, words, interpret=False)


@functools.partial(jax.jit, static_argnames=("eps", "kind", "words", "interpret"))  # layers share one trace
def _launch(x, y, weight, addresses, rank, epoch, parts, eps: float, kind: str, words: int, *, interpret: bool):
    """``parts``, all devices' y ``[n, tokens, D]``, take the place of packets where the kernel is interpreted."""
    (tokens, D), per_word = x.shape, 4 // x.dtype.itemsize
    width = D // per_word
    if tokens * width > words:
        raise ValueError(f"{tokens} tokens of {width} words: the workspace has room for {words} words")
    size = pl.next_power_of_2(width)
    shape = jax.ShapeDtypeStruct((tokens, width), jnp.int32)
    new, normed, following = kernel_call(
        _peer_sum,
        *map(_as_words, (x, y, weight)),
        *(addresses, rank, epoch, *(() if parts is None else (_as_words(parts),))),
        grid=(min(tokens, MOST_BLOCKS),),
        out_shape=[shape, shape, jax.ShapeDtypeStruct((1,), jnp.int32)],
        num_warps=min(max(size // _WORDS, 1), 32),
        interpret=interpret,
        size=size,
        words=words,
        dtype=x.dtype,
        eps=eps,
        kind=kind,
    )
    return _as_numbers(new, x.dtype), _as_numbers(normed, x.dtype), following


def _peer_sum(x_ref, y_ref, weight_ref, address_ref, rank_ref, epoch_ref, *refs, size, words, dtype, eps, kind):
    parts_ref, (new_ref, normed_ref, following_ref) = (refs[0] if len(refs) == 4 else None), refs[-3:]
    (tokens, width), n, blocks = x_ref.shape, address_ref.shape[0], pl.num_programs(0)
    epoch, rank, first = epoch_ref[0], rank_ref[0], pl.program_id(0)
    ids = jnp.arange(size, dtype=jnp.int32)

    def one_token(i, _):
        token = first + i * blocks
        exists = (ids < width) & (token < tokens)
        at = (token, ids)
        load = lambda ref, *before: pltriton.load(ref.at[(*before, *at)], mask=exists, other=0)  # noqa: E731
        own = load(y_ref)
        if parts_ref is None:
            others = _exchange(own, address_ref, rank, epoch, token * width + ids, exists, words)
        else:
            others = [load(parts_ref, device) for device in range(n)]
        # Each part in the place of its device, so that all of them add up in the same order.
        by_device = [jnp.where(device == rank, own, other) for device, other in enumerate(others)]
        total = [functools.reduce(jnp.add, part) for part in zip(*(_split(w, dtype) for w in by_device), strict=True)]
        stream = _split(load(x_ref), dtype)
        new = [(x + y).astype(dtype) for x, y in zip(stream, total, strict=True)]
        squares = sum(jnp.sum(jnp.where(exists, part.astype(jnp.float32) ** 2, 0.0)) for part in new)
        scale = jax.lax.rsqrt(squares / (width * len(new)) + eps)
        weights = _split(pltriton.load(weight_ref.at[at[1]], mask=exists, other=0), dtype)
        normed = [_scaled(part, scale, weight, kind) for part, weight in zip(new, weights, strict=True)]
        pltriton.store(new_ref.at[at], _joined(new), mask=exists)
        pltriton.store(normed_ref.at[at], _joined(normed), mask=exists)
        return _

    jax.lax.fori_loop(0, pl.cdiv(tokens, min(tokens, MOST_BLOCKS)), one_token, 0)
    following_ref[0] = epoch + 1  # by every block


def _exchange(own, address_ref, rank, epoch, place, exists, words: int) -> list[jax.Array]:
    """Send a token's words to all other devices; returns what each device has sent, and zeros for this one."""
    n = address_ref.shape[0]
    slot = (epoch % SLOTS) * n
    sent = jnp.zeros_like(own)
    for device in range(n):
        base = address_ref[device, 0], address_ref[device, 1]
        sent |= send(own, base, ((slot + rank) * words + place) * PACKET_BYTES, epoch, exists & (device != rank))
    mine = [pltriton.load(address_ref.at[rank, half]) for half in (0, 1)]
    return [
        receive(sent, mine, ((slot + device) * words + place) * PACKET_BYTES, epoch, exists & (device != rank))
        for device in range(n)
    ]


def _scaled(new, scale, weight, kind: str):
    """The norm of numbers whose root mean square has the inverse ``scale``; as ``norm`` has it."""
    normed = new.astype(jnp.float32) * scale
    if kind == "rms":
        return normed.astype(new.dtype) * weight.astype(new.dtype)
    return scale_in_float32(normed, weight, None, kind).astype(new.dtype)


def _as_words(x) -> jax.Array:
    """bfloat16 or float32 ``[.., D]`` as 32-bit words ``[.., D / 2]`` or ``[.., D]``, without a copy."""
    if x.dtype.itemsize == 2:
        x = x.reshape(*x.shape[:-1], -1, 2)
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _as_numbers(words, dtype) -> jax.Array:
    numbers = jax.lax.bitcast_convert_type(words, dtype)
    return numbers.reshape(len(words), -1)


def _split(words, dtype) -> list[jax.Array]:
    """In a kernel: the numbers of words, float32; of bfloat16 the lower halves, and the upper ones."""
    if dtype == jnp.float32:
        return [jax.lax.bitcast_convert_type(words, jnp.float32)]
    halves = jnp.left_shift(words, 16), words & jnp.int32(-65536)
    return [jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves]


def _joined(numbers) -> jax.Array:
    """In a kernel: the words of numbers that ``_split`` has, in their dtype."""
    if len(numbers) == 1:
        return jax.lax.bitcast_convert_type(numbers[0], jnp.int32)
    low, high = (jax.lax.bitcast_convert_type(half.astype(jnp.float32), jnp.int32) for half in numbers)
    return jnp.right_shift(low, 16) & jnp.int32(65535) | high & jnp.int32(-65536)
