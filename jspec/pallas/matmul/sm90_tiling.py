"""How ``jspec.pallas.matmul.few_tokens_sm90`` divides a product among the multiprocessors of a Hopper GPU."""

from typing import NamedTuple

from jax.experimental import pallas as pl

MULTIPROCESSORS = 132
LINES = 64  # of the left operand, which a warpgroup multiplies at once
BLOCK = 128  # outputs and inputs that share a scale, where these come in blocks
LOAD_REGISTERS, _REGISTERS = 40, 512  # of a thread in the warpgroup that loads, and of one in each warpgroup together
SHARED = 225 * 1024  # bytes of shared memory for arrays; a program instance has 227 KiB, barriers and gaps included
_VERY_FEW, _FEW, _SEVERAL = (
    16,
    80,
    160,
)  # the most tokens whose sums leave registers for more warpgroups, and for one tile
_SCALED = 96  # the most tokens of a tile where sums of groups are kept, too
_MANY = 640  # tokens, of which more are multiplied by tiles with more outputs
_PART_UNIT = 256  # parts of the inputs are multiples of this
TOKEN_UNIT, OUTPUT_UNIT, DEPTH_UNIT = 8, 8, 64  # tokens, outputs and inputs that lie together in shared memory
_MIN_STAGES = 3  # a copy has fewer inputs where fewer copies than this fit
_KEPT_STAGES = 4  # the fewest copies beside x, where all of it stays: codes are read so fast that x beside them counts
_UNEVEN = 1.25  # how much more the busiest instance may have to do than with smaller tiles
_STORED = 80  # the most tokens whose results are on their way out at once
_SPLIT_INPUTS, _SPLITS = 1024, 4  # the fewest inputs of a split, and the most splits: the norm reads the sums of each
_MAX_KEPT = 32  # parts of x, each of which has a barrier


class MosaicTiling(NamedTuple):
    """How the kernel divides a product.

    Attributes:
      outputs: output features of a warpgroup, a multiple of 64.
      tokens: tokens of a tile, a multiple of 8, at most 256.
      inputs: input features that are copied at a time, 64 or a multiple of 128. They divide those of the product or, of
        several times 128, 128 does.
      num_stages: how many such copies are under way at once.
      side_by_side: warpgroups that multiply other output features of the same copy.
      in_turns: warpgroups that multiply a part of the inputs each, of whose copies each gets one in turn; in the end their
        sums are added up.
      in_sequence: parts of the inputs that a warpgroup multiplies one after the other, and adds up.
      keep_x: whether all of x stays in shared memory. Otherwise it is copied beside the weights of every tile.
      ordered: whether x has its inputs in the order of ``to_mma_order``, in which weights of eight bits are read at once.
      num_splits: split-K, how many program instances share the inputs of the same results. Each stores partial sums.
    """

    outputs: int
    tokens: int
    inputs: int
    num_stages: int
    side_by_side: int = 1
    in_turns: int = 1
    keep_x: bool = False
    ordered: bool = False
    num_splits: int = 1
    in_sequence: int = 1

    @property
    def warpgroups(self) -> int:
        """How many multiply."""
        return self.side_by_side * self.in_turns

    @property
    def tile_outputs(self) -> int:
        return self.outputs * self.side_by_side

    def registers(self) -> int:
        """Of a thread in the warpgroups that multiply: what is left of those with which all warpgroups start."""
        all_warpgroups = self.warpgroups + 1
        started = all_warpgroups * min(232, _REGISTERS // all_warpgroups // 8 * 8)
        return min(232, (started - LOAD_REGISTERS) // self.warpgroups // 8 * 8)

    def busiest(self, tokens: int, outputs: int) -> int:
        """How many results the busiest program instance computes, those of each split or part."""
        own = pl.cdiv(self.tiles(tokens, outputs), MULTIPROCESSORS) * self.tile_outputs * self.tokens
        return own * self.split_parts

    def tiles(self, tokens: int, outputs: int) -> int:
        """How many tiles a product has, those of other splits included."""
        return pl.cdiv(tokens, self.tokens) * pl.cdiv(outputs, self.tile_outputs) * self.num_splits

    @property
    def split_parts(self) -> int:
        """In how many parts the inputs of a split are added up."""
        return self.in_turns * self.in_sequence

    @property
    def stored_tokens(self) -> int:
        """Of how many tokens results are on their way out at once."""
        return min(self.tokens, _STORED)

    def trips(self, inputs: int) -> int:
        """How many copies a part of the inputs has. Parts have the same inputs whatever a copy has. What is past the last
        input is zero."""
        parts = self.split_parts * self.num_splits
        unit = self.inputs if parts == 1 else max(_PART_UNIT, self.inputs)
        return pl.cdiv(inputs, unit * parts) * unit // self.inputs

    def copies(self, inputs: int) -> int:
        """How many copies a tile has."""
        return self.trips(inputs) * self.split_parts

    def split_inputs(self, inputs: int) -> int | None:
        """How many of the inputs a split has; None without split-K."""
        return self.copies(inputs) * self.inputs if self.num_splits > 1 else None

    def shared_bytes(self, inputs: int, weight_bytes: float, result_bytes: int) -> int:
        """Of shared memory, for numbers of a weight and of results of so many bytes each; barriers are not counted."""
        parts = self.copies(inputs) if self.keep_x else self.num_stages
        weight = int(self.num_stages * self.tile_outputs * self.inputs * weight_bytes)
        x, y = 2 * parts * self.tokens * self.inputs, result_bytes * self.side_by_side * self.stored_tokens * LINES
        return weight + x + y + 4 * (self.in_turns - 1) * self.tile_outputs * self.tokens


def few_tokens_tiling(
    tokens: int,
    outputs: int,
    inputs: int,
    bits: int,
    allow_partial_sums: bool = False,
    result_bytes: int = 2,
    scales_sums: bool = False,
    in_groups: bool = False,
) -> MosaicTiling:
    """The tiling for ``tokens`` and a weight ``[outputs, inputs]`` of 4 to 6, 8 or 16 bits, with partial sums only if
    ``allow_partial_sums``.

    Tensor cores add the products of 16 inputs after those of the 16 before, whatever the tile. So the result of a token has
    the same bits among any number of tokens: what is a part of the inputs follows from the weight alone, and parts are
    added in their order. The number of tokens chooses where they are multiplied: by other program instances, by several
    warpgroups at the same time, or by one after the other.

    Args:
      result_bytes: of a number of the results, unless these are partial sums.
      scales_sums: whether the sums of groups of inputs have scales: blocks, of which a copy has one.
      in_groups: whether scales come for groups of inputs at all.
    """
    splits, parts = parts_of_inputs(outputs, inputs, allow_partial_sums, scales_sums)
    result_bytes = 4 if splits > 1 else result_bytes
    several = _SCALED if scales_sums else _SEVERAL  # a group's sums are kept beside all sums
    token_tiles = pl.cdiv(tokens, several)
    tile_tokens = TOKEN_UNIT * pl.cdiv(pl.cdiv(tokens, token_tiles), TOKEN_UNIT)
    one = MosaicTiling(LINES, tile_tokens, 0, 0, num_splits=splits, in_sequence=parts)
    if tokens <= _FEW:
        very_few = tokens <= _VERY_FEW
        sides = (4, 2, 1) if parts == splits == 1 and bits < 16 and (bits < 8 or very_few) else (2, 1)
        if scales_sums and parts > 1 and not very_few:  # four warpgroups would not have registers for two sums
            sides = (1,)
        turns = parts if bits < 16 or very_few else 1
        divided = [one._replace(side_by_side=side, in_turns=turns, in_sequence=parts // turns) for side in sides]
    else:
        divided = [one._replace(side_by_side=2), one]
        tall = one._replace(outputs=2 * LINES, side_by_side=2)
        if splits == parts == 1 and outputs % tall.tile_outputs == 0 and not scales_sums:  # x is read less often
            if tokens > _MANY:
                divided = [tall._replace(tokens=128)]
            elif bits >= 8:
                divided = [tall, *divided]
        if splits > 1:  # partial sums of so many tokens take longer to write and to read than to add up here
            whole = one._replace(tokens=min(tile_tokens, 128), side_by_side=2, num_splits=1, in_sequence=splits)
            divided = [whole, *divided]
    if splits > 1:
        divided = [each for each in divided if whole_lines(outputs) % each.tile_outputs == 0]
    uneven = 1.0 if tokens <= _FEW else _UNEVEN
    least = min(each.busiest(tokens, outputs) for each in divided)
    chosen = next(each for each in divided if each.busiest(tokens, outputs) <= uneven * least)
    return _with_copies(chosen, inputs, bits, result_bytes, tokens, in_groups)


def _with_copies(
    tiling: MosaicTiling, inputs: int, bits: int, result_bytes: int, tokens: int, in_groups: bool
) -> MosaicTiling:
    """With as large copies as leave several under way, and all of x in shared memory where it takes little."""
    depths = {8: (BLOCK,) if in_groups else (BLOCK, DEPTH_UNIT), 16: (BLOCK, DEPTH_UNIT)}.get(bits, (2 * BLOCK, BLOCK))
    deep = [
        _with_stages(tiling._replace(inputs=depth), inputs, result_bytes, bits)
        for depth in depths
        if inputs % depth == 0
    ]
    fewest = _MIN_STAGES + (bits == 16) + 2 * (tiling.side_by_side > 2)
    chosen = next((one for one in deep if one.num_stages >= fewest), deep[-1])
    kept = _with_stages(chosen._replace(keep_x=True), inputs, result_bytes, bits)
    fits = tokens <= TOKEN_UNIT and kept.num_stages >= _KEPT_STAGES and kept.copies(inputs) <= _MAX_KEPT
    return kept if fits else chosen


def whole_lines(outputs: int) -> int:
    """The outputs that have room where results are written, those past the last one included."""
    return pl.cdiv(outputs, LINES) * LINES


def reads_past(outputs: int) -> bool:
    """Whether a copy of weights can reach past the last of so many outputs, which are whole eights or fewer than eight."""
    return outputs < OUTPUT_UNIT or outputs % OUTPUT_UNIT == 0


def parts_of_inputs(outputs: int, inputs: int, allow_partial_sums: bool, scales_sums: bool = False) -> tuple[int, int]:
    """Into how many splits the inputs of a weight are divided, and a split into how many parts: as many as keep
    multiprocessors busy that would have no tile of few tokens. Where there are several splits, each is one part.

    Where sums of groups are scaled, a warpgroup waits for each group's before it scales them: there are two parts even
    with tiles for all multiprocessors, so that another one multiplies meanwhile; and three splits, where these are most."""
    tiles = pl.cdiv(outputs, 2 * LINES)
    most = min(_SPLITS, MULTIPROCESSORS // tiles, inputs // _SPLIT_INPUTS) if allow_partial_sums else 1
    most = max(most, 1)
    splits = most if scales_sums else 1 << (most.bit_length() - 1)
    few = scales_sums or 2 * tiles <= MULTIPROCESSORS
    return splits, 2 if splits == 1 and few and inputs >= 2 * _SPLIT_INPUTS else 1


def _with_stages(tiling: MosaicTiling, inputs: int, result_bytes: int, bits: int) -> MosaicTiling:
    """With as many stages as fit into shared memory, a multiple of the turns, at most 16."""
    fits = [
        stages
        for stages in range(tiling.in_turns, 17, tiling.in_turns)
        if tiling._replace(num_stages=stages).shared_bytes(inputs, bits / 8, result_bytes) <= SHARED
    ]
    return tiling._replace(num_stages=max(fits, default=0))
