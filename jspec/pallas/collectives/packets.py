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
LOST = 0x7FC07FC0  # the word of a packet that has not come in that time: two NaNs of bfloat16, or a NaN of float32

_ADDRESS = """
.reg .b64 address, offset;
mov.b64 address, {$2, $3};
cvt.u64.u32 offset, $1;
add.s64 address, address, offset;
"""
# Operands: result; offset, the halves of the base address, epoch, whether the element exists, word.
_SEND = f"""{{
.reg .pred exists;
.reg .b64 packet;
{_ADDRESS}
setp.ne.b32 exists, $5, 0;
mov.b64 packet, {{$6, $4}};
@exists st.relaxed.sys.global.b64 [address], packet;
mov.b32 $0, 0;
}}"""
# Operands: result; offset, the halves of the base address, epoch, whether the element exists, what a send returned.
_RECEIVE = f"""{{
.reg .pred absent, done;
.reg .b32 epoch;
.reg .b64 packet, began, now;
{_ADDRESS}
setp.eq.b32 absent, $5, 0;
mov.b32 $0, $6;
@absent bra END;
mov.u64 began, %clock64;
WAIT:
ld.relaxed.sys.global.b64 packet, [address];
mov.b64 {{$0, epoch}}, packet;
setp.eq.b32 done, epoch, $4;
@done bra END;
mov.u64 now, %clock64;
sub.u64 now, now, began;
setp.lt.u64 done, now, {PATIENCE};
@done bra WAIT;
mov.b32 $0, {LOST};
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


def receive(sent, base, offsets, epoch, exists) -> jax.Array:
    """In a kernel: wait for packets, and return their words, int32 ``[n]``.

    Where no packet comes for ``PATIENCE`` the word is ``LOST``.

    Args:
      sent: what ``send`` returned, before which no packet is awaited.
      base: int32 ``(low, high)``, the halves of an address in this GPU's memory.
      offsets, epoch, exists: as for ``send``; the word of an element that does not exist is 0.
    """
    return _packets(_RECEIVE, sent, base, offsets, epoch, exists)


def _packets(asm: str, values, base, offsets, epoch, exists) -> jax.Array:
    each = lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.int32), offsets.shape)  # noqa: E731
    [result] = pltriton.elementwise_inline_asm(
        asm,
        args=[each(value) for value in (offsets, *base, epoch, exists.astype(jnp.int32), values)],
        constraints="=&r" + ",r" * 6,
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(offsets.shape, jnp.int32)],
    )
    return result
