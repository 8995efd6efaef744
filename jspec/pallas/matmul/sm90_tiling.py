"""How ``jspec.pallas.matmul.few_tokens_sm90`` divides a product among the multiprocessors of a Hopper GPU."""

from typing import NamedTuple

from jax.experimental import pallas as pl

MULTIPROCESSORS = 132
LINES = 64  # of the left operand, which a warpgroup multiplies at once
BLOCK = 128  # outputs and inputs that share a scale, where these come in blocks
LOAD_REGISTERS, _REGISTERS = 40, 512  # of a thread in the warpgroup that loads, and of one in each warpgroup together
SHARED = 226 * 1024  # bytes of shared memory for arrays; a program instance has 227 KiB
_FEW, _SEVERAL = 80, 160  # the most tokens whose sums leave registers for four warpgroups, and for one tile
_MANY = 640  # tokens, of which more are multiplied by tiles with more outputs
_PART_UNIT = 256  # parts of the inputs are multiples of this
TOKEN_UNIT, DEPTH_UNIT = 8, 64  # tokens and inputs that lie together in shared memory
_MIN_STAGES = 3  # a copy has fewer inputs where fewer copies than this fit
_KEPT_STAGES = 4  # the fewest copies beside x, where all of it stays: codes are read so fast that x beside them counts
_UNEVEN = 1.25  # how much more the busiest instance may have to do than with smaller tiles
_PARTIAL_SUMS = 4  # float32 partial sums have at most one in this many of the bytes of the weight
_SPLIT_INPUTS = 2048  # the fewest inputs of a split


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
        """Output features that the busiest program instance computes."""
        return pl.cdiv(self.tiles(tokens, outputs), MULTIPROCESSORS) * self.tile_outputs

    def tiles(self, tokens: int, outputs: int) -> int:
        """How many tiles a product has, those of other splits included."""
        return pl.cdiv(tokens, self.tokens) * pl.cdiv(outputs, self.tile_outputs) * self.num_splits

    @property
    def split_parts(self) -> int:
        """In how many parts the inputs of a split are added up."""
        return self.in_turns * self.in_sequence

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
        x, y = 2 * parts * self.tokens * self.inputs, result_bytes * self.side_by_side * self.tokens * LINES
        return weight + x + y + 4 * (self.in_turns - 1) * self.tile_outputs * self.tokens


def four_bit_tiling(
    tokens: int, outputs: int, inputs: int, allow_partial_sums: bool = False, result_bytes: int = 2
) -> MosaicTiling:
    """The tiling for ``tokens`` and a weight of four bits ``[outputs, inputs]``, with split-K only if
    ``allow_partial_sums``.

    Tensor cores add the products of 16 inputs after those of the 16 before, whatever the tile. So the result of a token has
    the same bits among any number of tokens: what is a part of the inputs, and in which order parts are added up, follows
    from the weight alone. The number of tokens chooses how parts are multiplied: by several warpgroups at the same time, or
    by one after the other.

    Args:
      result_bytes: of a number of the results, unless these are partial sums.
    """
    splits, parts = _parts(outputs, inputs, allow_partial_sums)
    token_tiles = pl.cdiv(tokens, _SEVERAL)
    tile_tokens = TOKEN_UNIT * pl.cdiv(pl.cdiv(tokens, token_tiles), TOKEN_UNIT)

    def tiling(side_by_side: int, in_turns: int) -> MosaicTiling:
        return MosaicTiling(
            *(LINES, tile_tokens, 0, 0, side_by_side, in_turns), num_splits=splits, in_sequence=parts // in_turns
        )

    if tokens <= _FEW:
        divided = [tiling(side, parts) for side in ((4, 2, 1) if parts == 1 else (2, 1))]
    elif tokens > _MANY and parts == 1 and outputs % (4 * LINES) == 0:  # x is read less often
        divided = [tiling(2, 1)._replace(outputs=2 * LINES, tokens=128)]
    else:
        divided = [tiling(2, 1), tiling(1, 1)]
    if splits > 1:
        divided = [one for one in divided if outputs % one.tile_outputs == 0]
    uneven = 1.0 if tokens <= _FEW else _UNEVEN
    least = min(one.busiest(tokens, outputs) for one in divided)
    chosen = next(one for one in divided if one.busiest(tokens, outputs) <= uneven * least)
    result_bytes = 4 if splits > 1 else result_bytes
    deep = [
        _with_stages(chosen._replace(inputs=depth), inputs, result_bytes, 4)
        for depth in (2 * BLOCK, BLOCK)
        if inputs % depth == 0
    ]
    fewest = _MIN_STAGES if chosen.side_by_side <= 2 else _MIN_STAGES + 2
    chosen = next((one for one in deep if one.num_stages >= fewest), deep[-1])
    kept = _with_stages(chosen._replace(keep_x=True), inputs, result_bytes, 4)
    return kept if tokens <= TOKEN_UNIT and kept.num_stages >= _KEPT_STAGES else chosen


def _parts(outputs: int, inputs: int, allow_partial_sums: bool) -> tuple[int, int]:
    """Into how many splits the inputs of a weight are divided, and a split into how many parts: as many as keep
    multiprocessors busy that would have no tile of few tokens."""
    tiles, splits = pl.cdiv(outputs, 2 * LINES), 1
    while allow_partial_sums and 2 * splits * tiles <= MULTIPROCESSORS and inputs >= 2 * splits * _SPLIT_INPUTS:
        splits *= 2
    few = 2 * splits * tiles <= MULTIPROCESSORS and inputs >= splits * _SPLIT_INPUTS
    return splits, 2 if few else 1


def few_tokens_tiling(
    tokens: int,
    outputs: int,
    inputs: int,
    allow_partial_sums: bool = False,
    result_bytes: int = 2,
    scaled_groups: bool = False,
    in_groups: bool = False,
) -> MosaicTiling:
    """The tiling for ``tokens`` and a weight of eight bits ``[outputs, inputs]``, with split-K only if
    ``allow_partial_sums``.

    Every tile reads x again, so tiles have many outputs, as long as the busiest instance has not much more to do than with
    smaller ones. Where there are not enough tiles for all multiprocessors, their inputs are split.

    Args:
      result_bytes: of a number of the results, unless these are partial sums.
      scaled_groups: whether the sums of groups of inputs have scales: blocks, of which a copy has one.
      in_groups: whether scales come for groups of inputs at all.
    """
    few, several = (_FEW // 2, 128) if scaled_groups else (_FEW, _SEVERAL)  # a group's sums are kept beside all sums
    token_tiles = pl.cdiv(tokens, several)
    tile_tokens = TOKEN_UNIT * pl.cdiv(pl.cdiv(tokens, token_tiles), TOKEN_UNIT)
    if tokens <= few:  # four warpgroups convert weights faster than two
        divided = MosaicTiling(64, tile_tokens, 0, 0, 2, 2), MosaicTiling(64, tile_tokens, 0, 0, 1, 4)
    else:
        divided = MosaicTiling(64, tile_tokens, 0, 0, 2, 1), MosaicTiling(64, tile_tokens, 0, 0, 1, 2)
        if token_tiles > 1 and outputs % 128 == 0 and not scaled_groups:  # x is read less often
            divided = MosaicTiling(128, tile_tokens, 0, 0, 2, 1), *divided
    least = min(one.busiest(tokens, outputs) for one in divided)
    tiling = next(one for one in divided if one.busiest(tokens, outputs) <= _UNEVEN * least)
    result_bytes = 4 if allow_partial_sums else result_bytes
    shallow = () if in_groups else (DEPTH_UNIT,)  # scales of groups come for a block of inputs
    depths = [depth for depth in (BLOCK, *shallow) if inputs % depth == 0]
    deep = [_with_stages(tiling._replace(inputs=depth), inputs, result_bytes, 8) for depth in depths]
    tiling = next((one for one in deep if one.num_stages >= _MIN_STAGES), deep[-1])
    while allow_partial_sums and _may_split(tiling, tokens, outputs, inputs):
        tiling = tiling._replace(num_splits=2 * tiling.num_splits)
    return tiling


def _with_stages(tiling: MosaicTiling, inputs: int, result_bytes: int, bits: int) -> MosaicTiling:
    """With as many stages as fit into shared memory, a multiple of the turns, at most 16."""
    fits = [
        stages
        for stages in range(tiling.in_turns, 17, tiling.in_turns)
        if tiling._replace(num_stages=stages).shared_bytes(inputs, bits / 8, result_bytes) <= SHARED
    ]
    return tiling._replace(num_stages=max(fits, default=0))


def _may_split(tiling: MosaicTiling, tokens: int, outputs: int, inputs: int) -> bool:
    """Whether twice as many splits have multiprocessors of their own, two trips and inputs each, and partial sums that are
    few."""
    twice = tiling._replace(num_splits=2 * tiling.num_splits)
    before_last = (twice.split_inputs(inputs) or 0) * (twice.num_splits - 1)
    few = 4 * tokens * twice.num_splits * _PARTIAL_SUMS <= inputs
    return twice.tiles(tokens, outputs) <= MULTIPROCESSORS and twice.trips(inputs) >= 2 and before_last < inputs and few
