"""What one decoder layer has of its own: sizes of its attention and MLP, and where its keys and values come from."""

import dataclasses

from jspec._validation import FieldChecks, is_int

# norm_placement -> the norms of a layer, in the order in which it applies them.
LAYER_NORMS = {
    "before": ("attention_norm", "mlp_norm"),
    "around": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "after": ("attention_out_norm", "mlp_out_norm"),
    "after_sum": ("attention_out_norm", "mlp_out_norm"),
}
OF_TARGET = -1  # as ``LayerConfig.reads_cache_of``: a layer of the target that a draft head drafts for


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The sizes of a decoder layer, and where its keys and values come from.

    Attributes:
      head_dim: H.
      num_kv_heads: G.
      intermediate_size: F, the width of the MLP.
      keys_are_values: whether the layer has no projection of values: its keys, before their norm and rotation, take their
        place (Gemma 4, 2026).
      reads_cache_of: the earlier layer whose keys and values this layer attends to, because it has none (Brandon et al.,
        "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", 2024); None if it has its own. ``OF_TARGET``
        for a layer of a draft head that attends to keys and values of its target.

    Example::

        global_layer_of_gemma_4_31b = LayerConfig(512, 4, 21504, keys_are_values=True)
    """

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    keys_are_values: bool = False
    reads_cache_of: int | None = None

    def __post_init__(self):
        check, source = FieldChecks(self, "layers."), self.reads_cache_of
        sizes = ("head_dim", "num_kv_heads", "intermediate_size")
        check.sizes(*sizes, expected="an integer of at least 1 and below 2^31")
        check.flags("keys_are_values")
        known = source is None or (is_int(source) and source >= OF_TARGET)
        check.require("reads_cache_of", known, "None or the number of an earlier layer")

    @property
    def projections(self) -> int:
        """How many projections of keys and values there are beside that of queries: 2, 1 or 0."""
        return 0 if self.reads_cache_of is not None else 1 if self.keys_are_values else 2

    @property
    def dimensions(self) -> dict[str, int]:
        """The size of each dimension letter that may differ between layers."""
        return {"H": self.head_dim, "G": self.num_kv_heads, "F": self.intermediate_size}

    def require_source(self, layer: int, others: "tuple[LayerConfig, ...]", windows: tuple[int | None, ...]):
        """Raise a ValueError unless this layer, the one with number ``layer``, can read the cache that it names."""
        source = self.reads_cache_of
        if source in (None, OF_TARGET):
            return
        check, field = FieldChecks(self, "layers."), "reads_cache_of"
        earlier = source < layer and others[source].reads_cache_of is None
        check.require(field, earlier, f"an earlier layer than {layer} with keys and values of its own")
        heads, others_heads = ((one.head_dim, one.num_kv_heads) for one in (self, others[source]))
        check.require(field, heads == others_heads, f"a layer with the heads of layer {layer}, {heads}")
        same = windows[source] == windows[layer]
        check.require(field, same, f"a layer with the window of layer {layer}, {windows[layer]}")
