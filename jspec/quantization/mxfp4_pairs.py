"""MXFP4, weights of four bits (Open Compute Project, Microscaling Formats, 2023), the format of gpt-oss' experts.

A group of 32 input features shares a power of two. A number is one of 16 multiples of it, which a *code* of four bits
names: a sign, two bits of exponent and one of mantissa (e2m1).

A byte of a checkpoint has the codes of two neighbours. jspec stores the bits in an order in which a GPU unpacks them
with the fewest instructions. Two groups make a *pair*, of 32 bytes. Two bytes of these make a *half*, the low byte
first, and two halves make a *word*. Word i of a pair holds the codes of features 4i to 4i + 3 of its first group, and of
its second. The first half of the word has those of features 4i (a below) and 4i + 2 (b) of the first group, and 4i (c)
and 4i + 2 (d) of the second. The other half has, in the same way, those of features 4i + 1 and 4i + 3.

| bits of a half | 0-2 | 3-5 | 6-8 | 9-11 | 12 | 13 | 14 | 15 |
|---|---|---|---|---|---|---|---|---|
| content | magnitude of c | of b | of a | of d | sign of b | of d | of c | of a |

A product reads one pair of many output features at a time, so these lie side by side: a weight ``[out, in]`` is uint8
``[pairs, out, 32]``. Not a bit of a code is changed. Its scales are uint32 ``[pairs, out]``. Such a number has the
*factors* of the two groups of a pair in its halves, that of the first in the low one: 2^126 times the scale, as the bits
of a bfloat16. (A kernel puts the bits of a code into a bfloat16, where they stand for 2^-126 of their number.) Where the
number of groups is odd, the last one is followed by a group of zeros."""

# Where a half holds the codes of a, b, c and d: the shifts to the right that bring the magnitude and the sign to bit 0.
BITS = {"a": (6, 15), "b": (3, 12), "c": (0, 14), "d": (9, 13)}
GROUP = 32  # input features that share a scale
PAIR = 2 * GROUP
LARGEST_SCALE = 128  # 2^1, for weights up to 12: larger ones have no factor. The format ends at 254, 2^127
_FACTOR = 126  # what is added to a scale for the exponent of its factor, in bfloat16: 2^126 times as much


def num_pairs(inputs: int) -> int:
    """How many pairs of groups there are, for so many input features."""
    return -(-inputs // PAIR)


def factors(first, second):
    """The stored scales of the two groups of a pair, ints or integer arrays of 32 bits."""
    return first + _FACTOR << 7 | second + _FACTOR << 23
