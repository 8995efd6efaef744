"""The config of an assistant of Gemma 4."""

import dataclasses
from typing import Any

from jspec._validation import require
from jspec.config import OF_TARGET, ModelConfig
from jspec.config.decoder_params import decoder_layers
from jspec.config.heads.base import LayeredConfig, require_count, require_same_target
from jspec.config.param_specs import EMBED, VOCAB, Axis, Parameter, indices, linear, matrix, norm
from jspec.config.tensor_names import names_of

TARGET_EMBED = Axis("Dt", "target_embed")
TWICE_TARGET_EMBED = Axis("2Dt", "target_embed_pair")
CLUSTERS, OF_CLUSTER = Axis("Nc", "clusters"), Axis("Vc", "cluster")


@dataclasses.dataclass(frozen=True)
class AssistantConfig(LayeredConfig):
    """An assistant (Gemma 4, 2026): layers of queries that attend to keys and values of the target, and have none.

    Attributes:
      layers: its decoder layers. Each reads the cache of the last layer of the target that has one and the same window.
      target_hidden_size: Dt, the width of the target, ``backbone_hidden_size`` in config.json.
      clusters: Nc, if the output head scores clusters of ``V / Nc`` tokens first, and only the tokens of the best of them;
        None if it scores all tokens.
      best_clusters: how many clusters it scores the tokens of; None without clusters.

    Example::

        from jspec.config import OF_TARGET, LayerConfig

        layer = LayerConfig(head_dim=8, num_kv_heads=1, intermediate_size=32, reads_cache_of=OF_TARGET)
        layers = ModelConfig("Gemma4ForCausalLM", 32, 16, 32, 2, 2, 1, 8, 64, layers=(layer, layer))
        head = AssistantConfig(layers, target_hidden_size=24, clusters=8, best_clusters=2)
    """

    layers: ModelConfig
    target_hidden_size: int
    clusters: int | None = None
    best_clusters: int | None = None

    method = "assistant"
    max_drafts = None
    trained_drafts = None
    borrowable = ()
    draft_vocab_size = None

    def __post_init__(self):
        require_count("target_hidden_size", self.target_hidden_size)
        c, V = self.layers, self.layers.vocab_size
        reads = all(c.layer(number).reads_cache_of == OF_TARGET for number in range(c.num_layers))
        require(reads, "layers", c.layers, "layers that read the cache of the target")
        both = (self.clusters is None) == (self.best_clusters is None)
        require(both, "best_clusters", self.best_clusters, "a number with clusters, and None without")
        if self.clusters is None:
            return
        require_count("clusters", self.clusters)
        require_count("best_clusters", self.best_clusters)
        require(V % self.clusters == 0, "clusters", self.clusters, f"a divisor of the vocabulary, {V}")
        fits = (self.best_clusters or 0) <= self.clusters
        require(fits, "best_clusters", self.best_clusters, f"at most the {self.clusters} clusters that there are")

    @property
    def decoder(self) -> Any:
        """None, because its layers cache nothing."""
        return None

    @property
    def dimensions(self):
        sizes = {**self.layers.dimensions, "Dt": self.target_hidden_size}
        clusters = self.clusters
        return sizes if clusters is None else {**sizes, "Nc": clusters, "Vc": self.layers.vocab_size // clusters}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        c, names = self.layers, names_of(self.layers.architecture)
        parameters = [
            *linear(
                "fuse_in", {"pre_projection": EMBED}, TWICE_TARGET_EMBED, quantization=c.quantization_of("fuse_in")
            ),
            *decoder_layers(c, indices(0, c.num_layers), names=names, prefix="model."),
            *norm("norm", "model.norm", EMBED, kind=c.norm),
            *linear("fuse_out", {"post_projection": TARGET_EMBED}, EMBED, quantization=c.quantization_of("fuse_out")),
            matrix("head", "model.embed_tokens.weight", VOCAB, EMBED),
        ]
        if self.clusters is not None:
            parameters += linear("centroids", {"masked_embedding.centroids": CLUSTERS}, EMBED)
            order = matrix("cluster_tokens", "masked_embedding.token_ordering", CLUSTERS, OF_CLUSTER)
            parameters.append(dataclasses.replace(order, dtype="int32"))
        return tuple(parameters)

    def sources(self, target: ModelConfig) -> tuple[int, ...]:
        """For each layer, the layer of ``target`` whose keys and values it attends to.

        Raises:
          ValueError: ``target`` has no layer with such a window, or that layer's heads are of another size.
        """
        found = []
        for number, window in enumerate(self.layers.windows):
            kind = "full attention" if window is None else f"a window of {window} tokens"
            owners = [
                other
                for other in range(target.num_layers)
                if target.layer(other).reads_cache_of is None and target.windows[other] == window
            ]
            if not owners:
                raise ValueError(
                    f"layer {number} of the assistant attends to keys of a layer with {kind}, and this target has none; "
                    "expected the target that the assistant was trained on"
                )
            own, theirs = self.layers.layer(number), target.layer(owners[-1])
            sizes = (own.num_kv_heads, own.head_dim), (theirs.num_kv_heads, theirs.head_dim)
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"layer {number} of the assistant attends to {sizes[0][0]} KV heads of {sizes[0][1]} numbers, and layer "
                    f"{owners[-1]} of this target has {sizes[1][0]} of {sizes[1][1]}; expected the target that the "
                    "assistant was trained on"
                )
            found.append(owners[-1])
        return tuple(found)

    def require_fit(self, target: ModelConfig):
        """Raise a ValueError unless width, vocabulary and the layers that it reads are those of ``target``."""
        require_same_target(self.method, target, self.target_hidden_size, self.layers.vocab_size)
        if target.latent is not None:
            raise ValueError("the assistant attends to keys and values, and this target caches latents")
        self.sources(target)
