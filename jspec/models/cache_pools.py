"""What each layer of a model keeps of the texts that it has read, and the pools and states that hold it.

Most layers keep keys and values, in a pool of the shape ``[G, pages, P, H]``. The KV heads come first, so that gathering
the pages of all rows gives ``[G, B, S, H]`` and no step transposes a cache. Page 0 is the null page: block tables are padded
with it, and nothing is ever written there.

Multi-head latent attention (``jspec.models.mla``) has a single pool in a layer, ``[1, pages, P, Ck + Hr]``: the keys of
one KV head that all attention heads share, and whose first Ck numbers are its values.

A layer with a gated delta net (``jspec.models.delta_net``) has no pages. It keeps a ``DeltaState``, with a part for each row
that is as large for a short text as for a long one."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.config import ModelConfig
from jspec.pallas.attention.fp8 import STORED, KVScales
from jspec.pallas.attention.move_path import move_path as move_path
from jspec.pallas.attention.table import ROPE_AND_WRITE_KV, Attention
from jspec.pallas.delta_net.projections import DeltaHeads
from jspec.pallas.delta_net.state import DeltaState, init_state
from jspec.pallas.mla.attention import IN_PAGES


class LayerKV(NamedTuple):
    """Keys and values of one layer: ``[G, pages, P, H]`` in a pool, ``[G, B, T, H]`` with a ``CausalView``.

    Where latents are cached, they are ``k``, and ``v`` is None. With ``scales``, keys, values and latents are bytes
    (``jspec.pallas.attention.fp8``).

    Example::

        pools = init_pool([CacheShape(heads=1, size=8)], pages=4, page_size=16, dtype=jnp.float32)
        assert isinstance(pools[0], LayerKV) and pools[0].k.shape == (1, 4, 16, 8)
    """

    k: jax.Array
    v: jax.Array | None
    scales: KVScales | None = None

    @property
    def in_pages(self) -> "LayerKV":
        """What of it lies in pages: all but the scales of heads, which all pages share."""
        return self if self.scales is None or self.scales.of_tokens else self._replace(scales=None)

    def with_pages(self, pages: "LayerKV") -> "LayerKV":
        """The same with the arrays of ``pages`` in place of those of ``in_pages``."""
        return pages if pages.scales is not None else pages._replace(scales=self.scales)

    def with_written(self, k, v, scales: KVScales | None = None) -> "LayerKV":
        """The same with new pools; ``scales`` are those of tokens, None if there are none."""
        return LayerKV(k, v, self.scales if scales is None else scales)


class KVRounding(NamedTuple):
    """That a layer caches keys and values, or latents, in eight bits (``jspec.pallas.attention.fp8``).

    Attributes:
      k, v: the scales of keys and of values, one for each KV head; None if every token has its own. Latents have one scale,
        which is ``k``, and ``v`` is None.
    """

    k: tuple[float, ...] | None = None
    v: tuple[float, ...] | None = None


class CacheShape(NamedTuple):
    """What a layer caches for one token: H numbers of each of G KV heads, for keys and once more for values.

    With ``latents``, there are H numbers for both together. ``rounding`` is None if they have the dtype of the model."""

    heads: int
    size: int
    latents: bool = False
    rounding: KVRounding | None = None


class StateShape(NamedTuple):
    """What a layer with a gated delta net keeps of one row, however long its text is: the sizes of a ``DeltaState``.

    Attributes:
      heads: the number and the sizes of heads.
      taps: W, of the convolution.
    """

    heads: DeltaHeads
    taps: int


LayerShape = CacheShape | StateShape | None


def has_states(shapes: Sequence[LayerShape]) -> bool:
    """Whether some layers of a model keep recurrent states."""
    return any(isinstance(shape, StateShape) for shape in shapes)


def cache_shape(config: ModelConfig, shards: int = 1) -> tuple[LayerShape, ...]:
    """The cache of one token in each decoder layer, or of one row in those with a gated delta net; None in layers that
    read another layer's. If there are more shards than KV heads, each has a copy of its own."""
    if config.latent is not None:
        return (CacheShape(1, config.latent.cached, latents=True),) * config.num_layers

    def of_layer(number: int) -> LayerShape:
        layer, nets = config.layer(number), config.delta_nets
        if nets is not None and config.has_delta_net(number):
            return StateShape(DeltaHeads(nets.key_heads, nets.value_heads, nets.key_size, nets.value_size), nets.taps)
        if layer.reads_cache_of is not None:
            return None
        return CacheShape(max(layer.num_kv_heads, shards), layer.head_dim)

    return tuple(map(of_layer, range(config.num_layers)))


def with_rounding(shapes: Sequence[LayerShape], rounding: Sequence[KVRounding]) -> tuple[LayerShape, ...]:
    """The shapes with the rounding of each layer. Where shards have copies of KV heads, they have their scales, too."""

    def of_layer(shape: LayerShape, how: KVRounding) -> LayerShape:
        if not isinstance(shape, CacheShape):
            return shape
        k, v = (each and tuple(scale for scale in each for _ in range(shape.heads // len(each))) for each in how)
        return shape._replace(rounding=KVRounding(k, v))

    return tuple(map(of_layer, shapes, rounding))


def gathers_pages(config: ModelConfig, dtype: str, on_gpu: bool) -> bool:
    """Whether attention copies the pages of all rows together, because no kernel reads them where they are."""
    latent, kind = config.latent, jnp.dtype(dtype)
    if not on_gpu:
        return True
    if latent is not None:
        query = jax.ShapeDtypeStruct((1, 1, 1, latent.cached), kind)
        return not IN_PAGES.serves(query, query, latent.rank)
    sizes = {config.layer(number).head_dim for number in range(config.num_layers)}
    queries = [jax.ShapeDtypeStruct((1, 1, 1, size), kind) for size in sizes]
    return not all(ROPE_AND_WRITE_KV.serves(Attention(query, query)) for query in queries)


def init_pool(shapes: Sequence[LayerShape], pages: int, page_size: int, dtype) -> tuple[LayerKV | None, ...]:
    """An empty pool for each layer with a ``CacheShape``, of models without recurrent states. ``pages`` counts the null
    page too."""

    def pool(shape: LayerShape) -> LayerKV:
        assert isinstance(shape, CacheShape), shape
        stored = dtype if shape.rounding is None else STORED
        zeros = functools.partial(jnp.zeros, (shape.heads, pages, page_size, shape.size), stored)
        scales = None if shape.rounding is None else _init_scales(shape, shape.rounding, pages, page_size)
        return LayerKV(zeros(), None if shape.latents else zeros(), scales)

    return tuple(None if shape is None else pool(shape) for shape in shapes)


def _init_scales(shape: CacheShape, rounding: KVRounding, pages: int, page_size: int) -> KVScales:
    """The scales of heads, or ones for the tokens of a pool."""

    def scales(of_heads: tuple[float, ...] | None) -> jax.Array:
        ones = jnp.ones((shape.heads, pages, page_size), jnp.float32)
        return ones if of_heads is None else jnp.asarray(of_heads, jnp.float32)

    return KVScales(scales(rounding.k), None if shape.latents else scales(rounding.v))


def without_slots(shapes: Sequence[LayerShape]) -> tuple[LayerKV | None, ...]:
    """The cache that a ``CausalView`` takes. Per layer: an empty pool that carries the KV scales if its cache is rounded,
    else None."""

    def of_layer(shape: LayerShape) -> LayerKV | None:
        rounds = isinstance(shape, CacheShape) and shape.rounding is not None
        return init_pool([shape], 0, 1, STORED)[0] if rounds else None

    return tuple(map(of_layer, shapes))


def init_cache(
    shapes: Sequence[LayerShape], pages: int, page_size: int, num_rows: int, most_tokens: int, dtype
) -> tuple[LayerKV | DeltaState | None, ...]:
    """``init_pool`` of a model that may have gated delta nets, with a state of ``num_rows`` rows for each of these; their
    verify passes have up to ``most_tokens`` query tokens."""

    def of_layer(shape: LayerShape) -> LayerKV | DeltaState | None:
        if isinstance(shape, StateShape):
            return init_state(num_rows, shape.heads, shape.taps, most_tokens, dtype)
        return init_pool([shape], pages, page_size, dtype)[0]

    return tuple(map(of_layer, shapes))
