"""Packets: how a kernel sends 32-bit words to the kernel of another GPU, and receives them.

A packet has 8 bytes: a word of data, and the *epoch*, the number of the exchange that it belongs to. Its sender stores it
into the other GPU's memory; the receiver reads its own memory until the packet there shows the epoch it waits for. A store
of 8 bytes is seen as a whole or not at all, so that neither a flag nor a fence nor any clearing is needed. It is the
protocol that NCCL calls LL, for "low latency" (Hu et al., "Demystifying NCCL", 2025).

Every element of an array is a packet with an address of its own. So nothing depends on how Triton distributes the
elements over threads, and elements beyond an array's end are left out by a mask.

Triton takes inline assembly for a pure function. What orders a send before a receive is that the receive takes what the
send returns.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

PACKET_BYTES = 8
PATIENCE = 4_000_000_000  # cycles of a multiprocessor for which a packet is awaited: two seconds or a little more
_SUSPECT = 0x7FC07FC0  # the word of a packet that has not come, and of some that have: two NaNs of bfloat16

# Operands of each: result; offset, the halves of the base address, epoch, whether the element exists, value.
_ADDRESS = """
.reg .b64 address, offset;
mov.b64 address, {$2, $3};
cvt.u64.u32 offset, $1;
add.s64 address, address, offset;
"""
_SEND = f"""{{
.reg .pred exists;
.reg .b64 packet;
{_ADDRESS}
setp.ne.b32 exists, $5, 0;
mov.b64 packet, {{$6, $4}};
@exists st.relaxed.sys.global.b64 [address], packet;
mov.b32 $0, 0;
}}"""
_IS_LATE = f"""{{
.reg .pred exists;
.reg .b32 word, epoch;
.reg .b64 packet;
{_ADDRESS}
setp.ne.b32 exists, $5, 0;
mov.b64 packet, {{$6, $4}};
@exists ld.relaxed.sys.global.b64 packet, [address];
mov.b64 {{word, epoch}}, packet;
sub.s32 $0, epoch, $4;
}}"""


def _receive(n: int) -> str:
    """The same of n elements, of each operand one after another: their packets are awaited together, so that a thread
    waits for one load and not for n of them."""
    offset, low, high, epoch, exists, value = ([f"${n * (k + 1) + i}" for i in range(n)] for k in range(6))
    each = lambda line: "\n".join(line(i) for i in range(n))  # noqa: E731
    return f"""{{
.reg .pred wait<{n}>, any;
.reg .b32 epoch<{n}>;
.reg .b64 packet<{n}>, address<{n}>, offset, began, now;
{each(lambda i: f"mov.b64 address{i}, {{{low[i]}, {high[i]}}};")}
{each(lambda i: f"cvt.u64.u32 offset, {offset[i]}; add.s64 address{i}, address{i}, offset;")}
{each(lambda i: f"setp.ne.b32 wait{i}, {exists[i]}, 0; mov.b32 ${i}, {value[i]};")}
mov.u64 began, %clock64;
WAIT:
mov.pred any, 0;
{each(lambda i: f"@wait{i} ld.relaxed.sys.global.b64 packet{i}, [address{i}];")}
{each(lambda i: f"@wait{i} mov.b64 {{${i}, epoch{i}}}, packet{i};")}
{each(lambda i: f"@wait{i} setp.ne.b32 wait{i}, epoch{i}, {epoch[i]}; or.pred any, any, wait{i};")}
@!any bra END;
mov.u64 now, %clock64;
sub.u64 now, now, began;
setp.lt.u64 any, now, {PATIENCE};
@any bra WAIT;
{each(lambda i: f"@wait{i} mov.b32 ${i}, {_SUSPECT};")}
END:
}}"""


def send(words, base, offsets, epoch, exists) -> jax.Array:
    """In a kernel: store a packet for each word.

    Args:
      words: int32 ``[n]``.
      base: int32 ``(low, high)``, the halves of an address in another GPU's memory.
      offsets: int32 ``[n]``, bytes behind it.
      epoch: int32 ``[]``.
      exists: bool ``[n]``; the other words are not sent.

    Returns:
      zeros, int32 ``[n]``, on which whatever is to come after the stores has to depend.
    """
    return _packets(_SEND, words, base, offsets, epoch, exists)


def receive(sent, base, offsets, epoch, exists, together: int) -> tuple[jax.Array, jax.Array]:
    """In a kernel: wait for packets.

    Args:
      sent: what ``send`` returned, before which no packet is awaited.
      base: int32 ``(low, high)``, the halves of an address in this GPU's memory.
      offsets, epoch, exists: as for ``send``; the word of an element that does not exist is 0.
      together: for how many packets a thread waits at a time. Each thread has to have a multiple of that: Triton would
        fill up a smaller number with elements that have no address.

    Returns:
      their words, int32 ``[n]``; and which packets have not come for ``PATIENCE``, bool ``[n]``.
    """
    words = _packets(_receive(together), sent, base, offsets, epoch, exists, together)
    # JAX lowers no assembly of two results. So a word that may stand for no packet is looked up once more.
    late = _packets(_IS_LATE, jnp.zeros_like(words), base, offsets, epoch, exists & (words == _SUSPECT))
    return words, late != 0


def _packets(asm: str, value, base, offsets, epoch, exists, together: int = 1) -> jax.Array:
    each = lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.int32), offsets.shape)  # noqa: E731
    [result] = pltriton.elementwise_inline_asm(
        asm,
        args=[each(operand) for operand in (offsets, *base, epoch, exists.astype(jnp.int32), value)],
        constraints=",".join(["=&r"] * together + ["r"] * (6 * together)),
        pack=together,
        result_shape_dtypes=[jax.ShapeDtypeStruct(offsets.shape, jnp.int32)],
    )
    return result
