"""The tilings of ``jspec.pallas.matmul.few_tokens_sm90`` that ``benchmarks.kernels.lowerings`` tries, by weight and number
of tokens."""

from jspec.pallas.matmul.sm90_tiling import SHARED, MosaicTiling, few_tokens_tiling

Tiling = MosaicTiling
# Fewer outputs in a tile divide the product more evenly among the multiprocessors, and more of them read x less often.
BF16 = {
    8: (
        Tiling(64, 8, 128, 8, keep_x=True),
        Tiling(64, 8, 128, 8, in_turns=2, keep_x=True),
        Tiling(64, 8, 128, 12),
    ),
    16: (
        Tiling(64, 16, 128, 5, keep_x=True),
        Tiling(64, 16, 128, 10),
        Tiling(64, 16, 64, 10, side_by_side=2),
    ),
    80: (
        Tiling(64, 80, 64, 7, side_by_side=2),
        Tiling(128, 80, 64, 4, side_by_side=2),
        Tiling(64, 80, 64, 8),
    ),
    160: (
        Tiling(64, 160, 64, 5, side_by_side=2),
        Tiling(128, 160, 64, 3, side_by_side=2),
    ),
}
EIGHT_BITS = {
    8: (
        Tiling(64, 8, 256, 8, in_turns=2, keep_x=True),
        Tiling(64, 8, 256, 8, in_turns=4, keep_x=True),
        Tiling(64, 8, 128, 8, side_by_side=2, in_turns=2, keep_x=True),
        Tiling(64, 8, 128, 8, side_by_side=2, keep_x=True),
    ),
    16: (
        Tiling(64, 16, 128, 10, in_turns=2, keep_x=True),
        Tiling(64, 16, 128, 8, in_turns=4, keep_x=True),
        Tiling(64, 16, 128, 10, side_by_side=2),
        Tiling(64, 16, 128, 8, side_by_side=2, in_turns=2),
    ),
    80: (
        Tiling(64, 80, 128, 5, side_by_side=2),
        Tiling(128, 80, 64, 6, side_by_side=2),
        Tiling(64, 80, 64, 6, side_by_side=4),
        Tiling(64, 80, 128, 4, side_by_side=2, in_turns=2),
        Tiling(64, 80, 128, 6, in_turns=3),
    ),
    160: (
        Tiling(64, 160, 64, 6, side_by_side=2),
        Tiling(128, 160, 64, 4, side_by_side=2),
    ),
}
BLOCKS = {
    8: (
        Tiling(64, 8, 128, 16, in_turns=2, keep_x=True),
        Tiling(64, 8, 128, 8, side_by_side=2, in_turns=2, keep_x=True),
        Tiling(64, 8, 128, 12, side_by_side=2),
        Tiling(64, 8, 128, 16, in_turns=2),
        Tiling(64, 8, 128, 16, in_turns=4),
        Tiling(64, 8, 128, 8, side_by_side=2, in_turns=2),
    ),
    16: (
        Tiling(64, 16, 128, 12, in_turns=2),
        Tiling(64, 16, 128, 12, in_turns=4),
        Tiling(64, 16, 128, 8, side_by_side=2, in_turns=2),
    ),
    80: (
        Tiling(64, 80, 128, 5, side_by_side=2),
        Tiling(64, 80, 128, 4, side_by_side=2, in_turns=2),
        Tiling(64, 80, 128, 6, in_turns=2),
        Tiling(64, 80, 128, 6, in_turns=3),
    ),
    160: (Tiling(64, 160, 128, 3, side_by_side=2),),
}
CODES = {
    8: (
        Tiling(64, 8, 256, 16, in_turns=2, keep_x=True),
        Tiling(64, 8, 256, 16, in_turns=4, keep_x=True),
        Tiling(64, 8, 256, 8, side_by_side=2, in_turns=2, keep_x=True),
        Tiling(64, 8, 128, 16, side_by_side=2, in_turns=2),
        Tiling(64, 8, 256, 12, side_by_side=2),
    ),
    16: (
        Tiling(64, 16, 256, 8, in_turns=4),
        Tiling(64, 16, 256, 10, side_by_side=2),
        Tiling(64, 16, 128, 12, side_by_side=2, in_turns=2),
        Tiling(64, 16, 256, 8, side_by_side=4),
    ),
    80: (
        Tiling(64, 80, 128, 6, side_by_side=2),
        Tiling(64, 80, 128, 4, side_by_side=4),
        Tiling(64, 40, 128, 8, side_by_side=2, in_turns=2),
        Tiling(64, 80, 128, 6, in_turns=3),
        Tiling(64, 80, 128, 6, side_by_side=3),
    ),
    160: (Tiling(64, 160, 128, 3, side_by_side=2), Tiling(64, 80, 128, 5, side_by_side=2)),
}
TILINGS = {
    "bf16": BF16,
    "int8": EIGHT_BITS,
    "fp8": EIGHT_BITS,
    "blocks": BLOCKS,
    "mxfp8": BLOCKS,
    "int4": CODES,
    "int4_zeros": CODES,
    "nvfp4": CODES,
    "nf4": CODES,
}
SMALL_TILINGS = tuple(  # where they are interpreted
    ("", Tiling(64, 8, 128, 4, side_by_side=2, in_turns=2, ordered=ordered)) for ordered in (False, True)
)


def tilings_for(kind: str, tokens: int, shape: tuple[int, int], in_parts: bool) -> list[tuple[str, Tiling]]:
    """Some tilings and what to call each: the one that products have, with other splits and with turns if ``in_parts``,
    and with x in another order; then those above of the smallest tile of tokens that holds all of them, or
    else of the largest."""
    outputs, inputs = shape
    tiles = TILINGS[kind]
    others = tiles[min((size for size in tiles if size >= tokens), default=max(tiles))]
    size = 2 if kind == "bf16" else 0.5 if tiles is CODES else 1
    named = [("", tiling) for tiling in others if tiling.shared_bytes(inputs, size, 2) <= SHARED]
    scaled, bits = kind == "blocks", int(8 * size)
    how = {"scales_sums": scaled, "in_groups": scaled or kind == "mxfp8"}
    chosen = few_tokens_tiling(tokens, outputs, inputs, bits, in_parts, **how)
    splits = [count for count in (1, 2, 3, 4) if count != chosen.num_splits and in_parts]
    variants = [chosen._replace(num_splits=count) for count in splits]
    variants += [one._replace(in_turns=2) for one in (chosen, *variants) if in_parts and one.in_turns == 1]
    variants = [one for one in variants if one.shared_bytes(inputs, size, 2) <= SHARED]
    variants += [chosen._replace(ordered=True)] if size == 1 and kind != "mxfp8" else []
    return [("chosen", chosen), *(("", tiling) for tiling in variants), *named]
