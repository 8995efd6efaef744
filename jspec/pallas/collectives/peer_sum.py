"""A sum over the GPUs of one process, with the residual sum and the norm behind it, in one launch.

In one trip every GPU sends its part to all others, in packets, and adds up all parts in the order of the GPUs. So all of
them have the same numbers, bit for bit. That is for few tokens: each of n GPUs sends n - 1 times what it has. In two trips
each GPU owns an n-th of a token's words, adds these up in the same order, and hands the result on: it sends 2 (n - 1) / n
times what it has, and waits twice. The bits are the same.

A block has some of the tokens; a token always belongs to the same block, and has its own place in the workspaces.

``benchmarks.kernels.sums`` times it beside XLA's sum.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.collectives.mailboxes import Mailboxes, first_of, interleaved, words_of_thread
from jspec.pallas.collectives.words import as_numbers, as_words, joined, split
from jspec.pallas.collectives.workspace import MOST_BLOCKS, Exchange
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.norm.rms_norm import add_norm_reference, scale_in_float32
from jspec.pallas.triton import kernel_call

_WORDS = (
    64  # of a token that one warp has: 14 us instead of 18 for 80 tokens of 4,096 numbers with half as many threads
)
KINDS = ("rms", "rms_wide", "rms_offset")


def num_trips(words: int, gpus: int) -> int:
    """In how many trips sums of tokens of so many 32-bit words are fastest: 1 or 2."""
    return 2 if gpus > 2 and words % gpus == 0 else 1


class Stream(NamedTuple):
    """The residual stream that a sum is added to, and the norm of the result.

    Attributes:
      x: ``[..., D]``, the same on every device.
      weight: of the norm, ``[D]``.
    """

    x: Any
    weight: Any


def peer_sum_reference(
    y: PartialSums, stream: Stream | None, exchange: Exchange, *, dtype, eps: float, kind: str, trips: int = 1
) -> tuple[Any, jax.Array]:
    """The total of y, or with a ``stream`` the residual stream with it added, and the norm of that.

    Inside of a ``jax.shard_map`` over ``y.reduce_axis``.

    Args:
      y: this device's summands ``[..., Y, D]``, of ``dtype`` or in float32. Their sum, in ``dtype``, is what the device
        sends.
      stream: of ``dtype``; None for the total alone.
      exchange: of which exchange this is.
      dtype: of the results.
      eps, kind: of the norm, as ``norm`` has them.
      trips: 1 or 2, which the epochs count; 2 if the number of GPUs divides that of a token's words.

    Returns:
      the total ``[..., D]``, or a tuple of both results; and the epochs of the next exchange.
    """
    tokens, total = _num_tokens(y), y.total(dtype)
    used = jnp.arange(MOST_BLOCKS, dtype=jnp.int32) < tokens
    epochs = jnp.where(exchange.epochs > 0, exchange.epochs + trips * used, exchange.epochs)
    if stream is None:
        return total, epochs
    return add_norm_reference(stream.x, total, stream.weight, None, eps=eps, kind=kind), epochs


def peer_sum_kernel(
    y: PartialSums, stream: Stream | None, exchange: Exchange, rank, *, dtype, eps: float, kind: str, trips: int = 1
) -> tuple[Any, jax.Array]:
    """``peer_sum_reference`` as a kernel, for bfloat16 and float32, on the device of ``rank``, int32 ``[1]``.

    The sum over devices, the bias and the residual stream are added up in float32, and rounded once.

    Raises:
      ValueError: the workspace is too small.
    """
    how = {"dtype": jnp.dtype(dtype), "eps": eps, "kind": kind, "trips": trips}
    return _launch(y, stream, exchange, rank, None, **how, interpret=False)


@functools.partial(jax.jit, static_argnames=("dtype", "eps", "kind", "trips", "interpret"))  # layers share one trace
def _launch(
    y: PartialSums,
    stream: Stream | None,
    exchange: Exchange,
    rank,
    parts,
    *,
    dtype,
    eps: float,
    kind: str,
    trips: int = 1,
    interpret: bool,
):
    """``parts``, what all devices send ``[n, tokens, D]``, take the place of packets where the kernel is interpreted."""
    shape, room = y.summands.shape, exchange.room
    tokens, D = _num_tokens(y), shape[-1]
    width = D * dtype.itemsize // 4
    if tokens > room.tokens or width > room.words:
        raise ValueError(f"{tokens} tokens of {width} words: the workspace has room for {room.tokens} of {room.words}")
    summands = y.summands.reshape(tokens, shape[-2], D)
    x = None if stream is None else stream.x.reshape(tokens, D)
    weight = None if stream is None else stream.weight.astype(dtype)
    bias = None if y.bias is None else y.bias.astype(dtype)
    size, words = pl.next_power_of_2(width), jax.ShapeDtypeStruct((tokens, width), jnp.int32)
    num_warps = min(max(size // _WORDS, 1), 32)
    summands = summands if summands.dtype != dtype else as_words(summands)
    inputs = summands, *map(as_words, (bias, x, weight, parts)), exchange.addresses, rank, exchange.epochs
    *sums, epochs = kernel_call(
        _peer_sum,
        *inputs,
        grid=(min(tokens, MOST_BLOCKS),),
        out_shape=[*([words] if stream is None else [words] * 2), jax.ShapeDtypeStruct((MOST_BLOCKS,), jnp.int32)],
        num_warps=num_warps,
        interpret=interpret,
        aliases={sum(array is not None for array in inputs) - 1: 1 if stream is None else 2},
        size=size,
        of_thread=words_of_thread(size, num_warps),
        room=room,
        dtype=dtype,
        eps=eps,
        kind=kind,
        trips=trips,
    )
    sums = [as_numbers(words, dtype).reshape(*shape[:-2], D) for words in sums]
    return (sums[0] if stream is None else tuple(sums)), epochs


def _peer_sum(
    y_ref,
    bias_ref,
    x_ref,
    weight_ref,
    parts_ref,
    address_ref,
    rank_ref,
    epochs_ref,
    *out_refs,
    size,
    of_thread,
    room,
    dtype,
    eps,
    kind,
    trips,
):
    *sum_refs, next_epochs_ref = out_refs
    refs = address_ref, rank_ref, epochs_ref, next_epochs_ref
    mailboxes = Mailboxes.open(*refs, room, of_thread, interpret=parts_ref is not None, trips=trips)
    (tokens, width), n, blocks = sum_refs[0].shape, mailboxes.count, pl.num_programs(0)
    ids = jnp.arange(size, dtype=jnp.int32)
    order = interleaved(ids, width, of_thread)
    owner = None if trips == 1 else ids // (width // n)  # of each word, in two trips

    def numbers(ref, *at, exists):
        if ref.dtype == jnp.int32:
            return split(pltriton.load(ref.at[(*at, ids)], mask=exists, other=0), dtype)
        places = (2 * ids, 2 * ids + 1)  # summands in float32 of numbers in bfloat16
        return [pltriton.load(ref.at[(*at, place)], mask=exists, other=0) for place in places]

    def one_token(i, late):
        token = mailboxes.block + i * blocks
        exists = (ids < width) & (token < tokens)
        own = _added([numbers(y_ref, token, part, exists=exists) for part in range(y_ref.shape[1])])
        own = joined([part.astype(dtype) for part in own])
        bias, stream, weight = (  # loaded before packets are awaited
            None if ref is None else numbers(ref, *at, exists=exists)
            for ref, *at in ((bias_ref,), (x_ref, token), (weight_ref,))
        )
        place, here = token * room.words + order, exists if owner is None else exists & (owner == mailboxes.rank)
        if parts_ref is None:
            sent = mailboxes.send(lambda _: own, place, exists, to=owner)
            others, absent = mailboxes.receive(sent, place, here)
            late = first_of(late, absent)
        else:
            others = [pltriton.load(parts_ref.at[(device, token, ids)], mask=exists, other=0) for device in range(n)]
        # Each part in the place of its device, so that all of them add up in the same order.
        by_device = [jnp.where(device == mailboxes.rank, own, other) for device, other in enumerate(others)]
        total = _added([split(words, dtype) for words in by_device])
        total = total if bias is None else _added([total, bias])
        total = total if stream is None else _added([stream, total])
        if owner is not None and parts_ref is None:
            summed, handed = joined([part.astype(dtype) for part in total]), mailboxes.following()
            sent = handed.send(lambda _: summed, place, here & (late == 0))
            came, absent = handed.receive_from(owner, sent, place, exists)
            late = first_of(late, absent)
            total = split(jnp.where(owner == mailboxes.rank, summed, came), dtype)
        new = [jnp.where(late < 0, jnp.float32(jnp.nan), part).astype(dtype) for part in total]
        pltriton.store(sum_refs[0].at[(token, ids)], joined(new), mask=exists)
        if weight is not None:
            squares = jnp.sum(sum(jnp.where(exists, part.astype(jnp.float32) ** 2, 0.0) for part in new))
            scale = jax.lax.rsqrt(squares / (width * len(new)) + eps)
            normed = [_scaled(part, scale, factor, kind) for part, factor in zip(new, weight, strict=True)]
            pltriton.store(sum_refs[1].at[(token, ids)], joined(normed), mask=exists)
        return late

    late = jnp.broadcast_to(mailboxes.late, (size,))
    late = jax.lax.fori_loop(0, pl.cdiv(tokens, min(tokens, MOST_BLOCKS)), one_token, late)
    mailboxes.close(late, trips)


def _added(parts) -> list[jax.Array]:
    """In a kernel: the sums of what ``split`` has of several words, in float32."""
    wide = ([number.astype(jnp.float32) for number in part] for part in parts)
    return [functools.reduce(jnp.add, numbers) for numbers in zip(*wide, strict=True)]


def _scaled(new, scale, weight, kind: str):
    """The norm of numbers whose root mean square has the inverse ``scale``; as ``norm`` has it."""
    normed = new.astype(jnp.float32) * scale
    if kind == "rms":
        return normed.astype(new.dtype) * weight.astype(new.dtype)
    return scale_in_float32(normed, weight, None, kind).astype(new.dtype)


def _num_tokens(y: PartialSums) -> int:
    *before, _, _ = y.summands.shape
    return functools.reduce(int.__mul__, before, 1)
