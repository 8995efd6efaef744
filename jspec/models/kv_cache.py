"""Views of the KV cache: where the keys and values of new tokens are written, and to which slots these tokens attend.

``jspec.models.cache_pools`` has the pools. A block table says for each row which pages of a pool are its own.

Rolling back rejected drafts only changes a row's length. A cache slot at or past that length may hold anything, because
it is rewritten before a query can see it: a query at position p attends to slots j <= p, and the keys and values of
every valid token are written before any query attends."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jspec.config import NULL_PAGE
from jspec.models.cache_pools import LayerKV
from jspec.pallas.attention.fp8 import KVScales, decode_latents, rounded
from jspec.pallas.attention.reference import Rotation, apply_rope, causal_mask, grouped_attention
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries, TreeMask
from jspec.pallas.attention.table import ONE_LAUNCH, ROPE_AND_WRITE_KV, Attention, paged_attention
from jspec.pallas.delta_net.recur import DeltaInputs, Rows, recur, recur_from_zero
from jspec.pallas.delta_net.state import DeltaState
from jspec.pallas.dispatch import by_platform
from jspec.pallas.mla.attention import IN_PAGES, latent_attention
from jspec.pallas.mla.norm_rope_write_kv import norm_rope_latents, norm_rope_write_kv_kernel
from jspec.pallas.mla.prefill import UP_PROJECTED, up_projected_attention
from jspec.pallas.weights.head_maps import HeadMaps


class View:
    """Decides where the keys and values of T new tokens of each row are stored, and to which slots these tokens attend.

    A view has the methods that the layers of its models call: one for training, for example, has none for latents and
    recurrent states. A method that it lacks raises a TypeError that names both.

    Attributes:
      caches_latents: whether multi-head latent attention caches latents, by ``write_latent_kv``; otherwise it caches
        keys and values of all heads, by ``write``.

    Example::

        def causal(model, tokens):  # every implementation is passed to a model in the same way
            view: View = CausalView(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
            return model(tokens, view.positions, (None,) * model.config.num_layers, view)
    """

    caches_latents: ClassVar[bool] = False

    def _lacks(self, method: str) -> TypeError:
        return TypeError(f"{type(self).__name__} has no {method}: expected a view for layers that call it")

    def write(self, kv, k, v) -> Any:
        """Write rotated keys and values ``[B, T, G, H]``; returns the updated ``kv``. Latents are ``k``, and ``v`` is
        None."""
        raise self._lacks("write")

    def attend(self, q, kv, spec: AttentionSpec) -> jax.Array:
        """Attention of rotated queries ``[B, T, N, H]`` over the slots that each may see; returns the same shape."""
        raise self._lacks("attend")

    def extend(self, qkv, rotation: Rotation | None, kv, num_kv_heads: int, spec: AttentionSpec):
        """Rotate queries and keys, write keys and values, and attend.

        Args:
          qkv: ``[B, T, N + 2G, H]``: the queries, keys and values of the new tokens.
          rotation: the rotary embedding of the tokens' positions, None if nothing is rotated.
          kv: the cached keys and values of this layer.
          num_kv_heads: G.
          spec: how the new tokens attend.

        Returns:
          the attention's output ``[B, T, N, H]``, and ``kv`` with the new keys and values.
        """
        q, kv = self.rope_and_write_kv(qkv, rotation, kv, num_kv_heads)
        return self.attend(q, kv, spec), kv

    def attend_cached(self, q, rotation: Rotation | None, kv, spec: AttentionSpec) -> jax.Array:
        """Rotate queries ``[B, T, N, H]``, and attend to keys and values that another layer has written of the same
        tokens; returns the same shape."""
        return self.attend(apply_rope(q, rotation), kv, spec)

    def recur(self, inputs: DeltaInputs, state: DeltaState | None) -> tuple[jax.Array, DeltaState | None]:
        """Let a gated delta net read the new tokens; returns its outputs ``[B, T, Nv, Dv]``, and its state behind them."""
        raise self._lacks("recur")

    def write_latent_kv(self, compressed, query_weight, latent_weight, eps: float, rotation: Rotation, kv) -> Any:
        """Norm, rotate and write latents and keys of the new tokens; arguments as of ``norm_rope_latents``.

        Returns:
          the compressed queries ``[B, T, Cq]`` after their norm, and ``kv`` with the new latents.
        """
        raise self._lacks("write_latent_kv")

    def round_latents(self, latents, kv) -> jax.Array:
        """Latents and rotated keys ``[B, T, Ck + Hr]`` that are not cached, as all tokens are to see them; ``kv`` as for
        ``write``."""
        return latents

    def attend_latents(self, q, kv, rank: int, scale: float) -> jax.Array:
        """Attention of absorbed queries over latents, the keys and values of one KV head.

        Args:
          q: ``[B, T, N, Ck + Hr]``, absorbed queries, and their rotated parts.
          kv: the latents of this layer, those of the new tokens among them.
          rank: Ck.
          scale: the factor of products of queries and keys.

        Returns:
          weighted sums of latents ``[B, T, N, Ck]``.
        """
        raise self._lacks("attend_latents")

    def up_projects(self, q, kv, maps: HeadMaps) -> bool:
        """Whether latent attention is to use ``attend_up_projected``, with the same arguments, in place of
        ``attend_latents``."""
        return False

    def attend_up_projected(self, q, kv, maps: HeadMaps, scale: float) -> jax.Array:
        """Attention over up-projected keys and values of all heads.

        Args:
          q: ``[B, T, N, Hn + Hr]``, the last Hr numbers rotated.
          kv: the latents of this layer, those of the new tokens among them.
          maps: the up-projection.
          scale: the factor of products of queries and keys.

        Returns:
          weighted sums of values ``[B, T, N, Hv]``.
        """
        raise self._lacks("attend_up_projected")

    def rope_and_write_kv(self, qkv, rotation: Rotation | None, kv, num_kv_heads: int):
        """The rotated queries ``[B, T, N, H]``, and ``kv`` with the rotated keys and the values; arguments as in
        ``extend``."""
        N = qkv.shape[2] - 2 * num_kv_heads
        q, k, v = jnp.split(qkv, [N, N + num_kv_heads], axis=2)
        return apply_rope(q, rotation), self.write(kv, apply_rope(k, rotation), v)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedView(View):
    """A view of keys and values in a pool of pages.

    Attributes:
      table: int32 ``[B, M]``, the pages of each row in the order of its text, padded with the null page.
      positions: int32 ``[B, T]``, the cache slot of each token. The slots of a row's valid tokens are consecutive.
      valid: bool ``[B, T]``, whether a token counts. Nothing is written of an invalid one, and its output is arbitrary.
      shared: whether several rows may be parts of one text, which share pages. Then no row may attend before all rows
        have written.
      may_up_project: whether attention may compute keys and values of all pages before it begins: latent attention those
        of all heads, and attention over bytes those in bfloat16. Then the rows' texts have no more pages than
        ``jspec.pallas.attention.pages_in_use.max_prefill_pages``.
      recurrent: which rows of recurrent states the tokens belong to; None for models without such states.
      tree: which tokens see which, if they are a tree of drafts. Latent attention and recurrent states take none.

    Example::

        positions = jnp.array([[0, 1, 2]])  # three new tokens of one row
        view = PagedView(table=jnp.array([[1, 2]]), positions=positions, valid=positions >= 0)  # its pages are 1 and 2
    """

    table: jax.Array
    positions: jax.Array
    valid: jax.Array
    shared: bool = dataclasses.field(default=False, metadata={"static": True})
    may_up_project: bool = dataclasses.field(default=False, metadata={"static": True})
    recurrent: Rows | None = None
    tree: TreeMask | None = None

    caches_latents = True

    @property
    def queries(self) -> PagedQueries:
        """The tokens, as attention functions take them."""
        return PagedQueries(self.table, self.positions, self.valid, self.tree)

    def write(self, kv: LayerKV, k, v) -> LayerKV:
        """Scatter k and v ``[B, T, G, H]`` into their pages, rounded if the pools have scales. Tokens that are invalid or
        past the table are dropped."""
        pages, page_size = kv.k.shape[1:3]
        index = self.positions // page_size
        inside = (self.positions >= 0) & (index < self.table.shape[1])
        page = jnp.take_along_axis(self.table, jnp.clip(index, 0, self.table.shape[1] - 1), axis=1)
        page = jnp.where(self.valid & inside & (page != NULL_PAGE), page, pages)  # ``pages`` is out of range: dropped
        slot = self.positions % page_size

        def put(pool, new):
            new = jnp.moveaxis(new, 2, 0).astype(pool.dtype)  # [G, B, T, H], small
            return pool.at[:, page, slot].set(new, mode="drop")

        new_scales = None
        if kv.scales is not None:
            (k, v), new_scales = _rounded(k, v, kv.scales)
        scales = new_scales and jax.tree.map(put, kv.scales, new_scales)
        return kv.with_written(put(kv.k, k), None if kv.v is None else put(kv.v, v), scales)

    def recur(self, inputs: DeltaInputs, state: DeltaState | None) -> tuple[jax.Array, DeltaState | None]:
        """As ``View.recur``."""
        self.queries.require_tree(supported=False)
        assert self.recurrent is not None
        assert state is not None
        return recur(inputs, state, self.recurrent)

    def attend(self, q, kv: LayerKV, spec: AttentionSpec) -> jax.Array:
        """Attention of each query in ``[B, T, N, H]`` over its row's slots up to the query's position; the same
        shape."""
        return paged_attention(q, kv.k, kv.v, self.queries, spec, kv.scales, self.may_up_project)

    def write_latent_kv(self, compressed, query_weight, latent_weight, eps: float, rotation: Rotation, kv: LayerKV):
        """As ``View.write_latent_kv``. On an NVIDIA GPU it is one kernel."""

        def composed(view, compressed, query_weight, latent_weight, rotation, kv):
            q, latents = norm_rope_latents(compressed, query_weight, latent_weight, eps, rotation)
            return q, view.write(kv, latents[:, :, None], None)

        def kernel(view, compressed, query_weight, latent_weight, rotation, kv):
            args = compressed, query_weight, latent_weight, eps, rotation, kv.k, view.queries, kv.scales
            q, pool, *scales = norm_rope_write_kv_kernel(*args)
            return q, kv.with_written(pool, None, *scales)

        args = self, compressed, query_weight, latent_weight, rotation, kv
        return by_platform(kernel, composed, *args, supported=IN_PAGES.serves(compressed, kv.k, latent_weight.shape[0]))

    def attend_latents(self, q, kv: LayerKV, rank: int, scale: float) -> jax.Array:
        """As ``View.attend_latents``."""
        return latent_attention(q, kv.k, self.queries, kv.scales, rank=rank, scale=scale)

    def up_projects(self, q, kv: LayerKV, maps: HeadMaps) -> bool:
        """As ``View.up_projects``: on Hopper GPUs, for many query tokens of sizes that their kernel supports."""
        return self.may_up_project and UP_PROJECTED.serves(q, kv.k, self.queries, maps)

    def attend_up_projected(self, q, kv: LayerKV, maps: HeadMaps, scale: float) -> jax.Array:
        """As ``View.attend_up_projected``."""
        return up_projected_attention(q, kv.k, self.queries, maps, kv.scales, scale=scale)

    def rope_and_write_kv(self, qkv, rotation: Rotation | None, kv: LayerKV, num_kv_heads: int):
        """As ``View.rope_and_write_kv``. On an NVIDIA GPU it is one kernel."""
        composed = functools.partial(View.rope_and_write_kv, num_kv_heads=num_kv_heads)

        def kernel(view, qkv, rotation, kv):
            q, *written = ROPE_AND_WRITE_KV.kernel(qkv, rotation, kv.k, kv.v, view.queries, kv.scales)
            return q, kv.with_written(*written)

        supported = ROPE_AND_WRITE_KV.serves(Attention(qkv, kv.k))
        return by_platform(kernel, composed, self, qkv, rotation, kv, supported=supported)

    def extend(self, qkv, rotation: Rotation | None, kv: LayerKV, num_kv_heads: int, spec: AttentionSpec):
        """As ``View.extend``. On an NVIDIA GPU it is one kernel, where each row has few tokens and pages of its own. In
        that kernel a row attends to slots that other rows have written before the call, and may miss those that they
        write in it."""
        composed = functools.partial(View.extend, num_kv_heads=num_kv_heads, spec=spec)

        def kernel(view, qkv, rotation, kv):
            out, *written = ONE_LAUNCH.kernel(qkv, rotation, kv.k, kv.v, view.queries, spec, scales=kv.scales)
            return out, kv.with_written(*written)

        supported = not self.shared and ONE_LAUNCH.serves(Attention(qkv, kv.k, self.queries))
        return by_platform(kernel, composed, self, qkv, rotation, kv, supported=supported)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CausalView(View):
    """Causal attention among the T tokens of the call. Nothing is cached: for entire texts and for training.

    A layer that rounds what it caches does so here, too, if its cache is that of ``cache_pools.without_slots``.

    Example::

        view = CausalView(positions=jnp.arange(5)[None])  # one text of five tokens
    """

    positions: jax.Array  # int32 [B, T]

    def write(self, kv, k, v) -> LayerKV:
        scales = kv.scales if isinstance(kv, LayerKV) else None
        if scales is None or scales.v is None:  # they follow from latents, which ``round_latents`` has rounded
            return LayerKV(jnp.moveaxis(k, 2, 0), jnp.moveaxis(v, 2, 0))  # [G, B, T, H]
        (k, v), of_tokens = _rounded(k, v, scales)
        scales = scales if of_tokens is None else KVScales(*(jnp.moveaxis(scale, 2, 0) for scale in of_tokens))
        return LayerKV(jnp.moveaxis(k, 2, 0), jnp.moveaxis(v, 2, 0), scales)

    def round_latents(self, latents, kv) -> jax.Array:
        scales = kv.scales if isinstance(kv, LayerKV) else None
        if scales is None:
            return latents
        codes, of_tokens = rounded(latents[:, :, None], None if scales.of_tokens else scales.k)
        return decode_latents(codes, scales.k if of_tokens is None else of_tokens, latents.dtype)[:, :, 0]

    def attend(self, q, kv: LayerKV, spec: AttentionSpec) -> jax.Array:
        slots = jnp.arange(q.shape[1], dtype=jnp.int32)
        mask = causal_mask(jnp.broadcast_to(slots[None], q.shape[:2]), slots, spec.window)
        return grouped_attention(q, kv.k, kv.v, mask, spec, kv.scales)

    def recur(self, inputs: DeltaInputs, state: DeltaState | None) -> tuple[jax.Array, None]:
        """As ``View.recur``, of entire texts; no state is kept."""
        del state
        return recur_from_zero(inputs), None


def _rounded(k, v, scales: KVScales) -> tuple[tuple[jax.Array, Any], KVScales | None]:
    """Keys and values ``[B, T, G, H]`` as bytes, and their own scales ``[B, T, G]``, None if ``scales`` are of heads. ``v``
    is None for latents, and stays so."""
    of_heads = KVScales(None, None) if scales.of_tokens else scales
    codes, own = rounded(k, of_heads.k)
    v, v_own = (None, None) if v is None else rounded(v, of_heads.v)
    return (codes, v), KVScales(own, v_own) if scales.of_tokens else None
