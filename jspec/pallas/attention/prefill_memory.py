"""The shared memory of a program instance of ``jspec.pallas.attention.prefill_sm90``, and where it stands in its blocks."""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.attention.prefill_launch import WARPGROUP_QUERIES, WARPGROUPS, PrefillLaunch


class SharedMemory(NamedTuple):
    """Shared memory of a program instance. A barrier with a number of stages has one part for each of them.

    Attributes:
      q: ``[2, 64, H]``, queries, and in the end results.
      k, v: ``[stages, slots, H]`` and ``[stages, slots, Hv]``.
      q_here: the queries of a warpgroup have arrived.
      k_here, v_here: a tile has arrived.
      tail_here: the last tile of values has arrived, and unseen slots have to be cleared.
      k_read, v_read: both warpgroups have multiplied a tile, whose memory is free.
      pingpong: the warpgroups that compute take the tensor cores in turn.
    """

    q: Any
    k: Any
    v: Any
    q_here: Any
    k_here: Any
    v_here: Any
    tail_here: Any
    k_read: Any
    v_read: Any
    pingpong: Any

    @classmethod
    def types(cls, launch: PrefillLaunch, dtype) -> "SharedMemory":
        layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        matrix = lambda *shape: plgpu.SMEM(shape, dtype, transforms=layout)  # noqa: E731
        here = plgpu.Barrier(num_arrivals=launch.tile_pages, num_barriers=launch.num_stages)
        read = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=launch.num_stages)
        return cls(
            q=matrix(WARPGROUPS, WARPGROUP_QUERIES, launch.H),
            k=matrix(launch.num_stages, launch.tile_slots, launch.H),
            v=matrix(launch.num_stages, launch.tile_slots, launch.Hv),
            q_here=plgpu.Barrier(num_arrivals=launch.warpgroup_heads, num_barriers=WARPGROUPS),
            k_here=here,
            v_here=here,
            tail_here=plgpu.Barrier(num_arrivals=launch.tile_pages),
            k_read=read,
            v_read=read,
            pingpong=plgpu.Barrier(num_arrivals=WARPGROUPS),
        )


class QueryBlock(NamedTuple):
    """In a kernel: a block, and between which tiles it masks; numbers are those of ``block_bounds``.

    Attributes:
      g, group: the KV head, and the group of its attention heads.
      before: how many tiles the instance has read for earlier blocks. The memory of a tile, and the phase of its
        barriers, follow from how many tiles were read before it.
    """

    b: Any
    g: Any
    group: Any
    number: Any
    first: Any
    unmasked: Any
    masked: Any
    end: Any
    newest: Any
    before: Any

    @classmethod
    def of(cls, bounds_ref, i, before, launch: PrefillLaunch) -> "QueryBlock":
        """The i-th block of this program instance."""
        b, group, number = launch.block(lax.axis_index("instance"), i)
        first, unmasked, masked, end, newest = (bounds_ref[b, number, j] for j in range(5))
        if launch.window is None:  # known when the kernel is compiled
            first = unmasked = 0
        return cls(b, launch.kv_head(group), group, number, first, unmasked, masked, end, newest, before)

    def count(self, i):
        """How many tiles the instance has read before tile i of this block."""
        return self.before + i - self.first
