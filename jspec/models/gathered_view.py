"""A view of a cache in shards, for a draft head that every device has: each device attends with the heads whose keys and
values it has, and all of them gather the results."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.config import Shards
from jspec.models.kv_cache import View
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.collectives.peers import Peers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredView(View):
    """Attention of whole queries to keys and values that n devices share, inside of a ``jax.shard_map``. It writes nothing.

    Attributes:
      view: of the device's own heads.
      peers: the other devices; None leaves exchanges to XLA.
      shards: of the target, whose cache it is.
    """

    view: View
    peers: Peers | None
    shards: Shards = dataclasses.field(metadata={"static": True})

    def attend_cached(self, q, rotation: Rotation | None, kv, spec: AttentionSpec) -> jax.Array:
        """As ``View.attend_cached``, of the queries ``[B, T, N, H]`` of all heads; n divides N."""
        B, T, N, H = q.shape
        local = N // self.shards.count
        first = jax.lax.axis_index(self.shards.axis) * local
        own = jax.lax.dynamic_slice_in_dim(q, first, local, axis=2)
        attended = self.view.attend_cached(own, rotation, kv, spec)
        if self.peers is not None and self.peers.serve_parts(attended.shape, attended.dtype):
            parts = self.peers.all_gather(attended)
        else:
            parts = jax.lax.all_gather(attended, self.shards.axis)
        return jnp.moveaxis(parts, 0, 2).reshape(B, T, N, H)
