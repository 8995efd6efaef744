"""Multi-token prediction layers (DeepSeek-V3, 2024): decoder layers that come with a model and predict further tokens.

Slot i reads feature i, which is the target's hidden state after its final norm, and token i + 1, as a slot of an EAGLE
head does. Its output gives the logits of token i + 2 through the target's output head or a part of it, and takes the
place of feature i + 1 where the target has not computed it yet. The methods are those of ``jspec.models.heads.eagle``,
and ``read``."""

import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import MTPConfig
from jspec.models.decoder_layer import Layer
from jspec.models.heads.draft_vocabulary import placeholder_ids, rows_of_target
from jspec.models.heads.eagle import LayeredHead
from jspec.models.layers import Norm, linear_maps


class MTPHead(LayeredHead):
    """The layers; each has two norms and a linear map before it, and a norm behind it.

    A checkpoint may have several layers. Layer k is for draft k, and the last one for all further drafts. The slots that
    the target has read have the same inputs for every layer: the results computed for a draft are discarded.

    Attributes:
      token_norms, feature_norms: the norms of embeddings and of features.
      fuse_in: the linear maps from (embedding, feature) ``[2D]`` to a layer ``[D]``.
      layers: the decoder layers.
      norms: the norms of their outputs, which the output head reads.
      head, draft_ids: as of ``EagleHead``.
    """

    def __init__(self, config: MTPConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        c = config.layers
        self.config = config

        def norms():
            return nnx.List([Norm(c.hidden_size, c.rms_norm_eps, c.norm, dtype=dtype) for _ in range(c.num_layers)])

        self.token_norms, self.feature_norms, self.norms = norms(), norms(), norms()
        linear, D = linear_maps(c, "", dtype=dtype, rngs=rngs), c.hidden_size
        self.fuse_in = nnx.List([linear(f"fuse_in.{i}", 2 * D, D) for i in range(c.num_layers)])
        self.layers = nnx.List([Layer(c, i, dtype=dtype, rngs=rngs) for i in range(c.num_layers)])
        Vd = config.dimensions["Vd"]
        self.head = linear("head", D, Vd, quantization=c.head_quantization) if config.reduced else None
        self.draft_ids = placeholder_ids(config)
        self.draft_tokens = None  # before ``prepare``

    def __call__(self, embedded, features, positions, cache, view):
        """Read T slots of each row by every layer; hidden states ``[B, T, D]`` are those of the first. See
        ``jspec.models.protocols.DraftHead``."""
        hidden, cache = self.read(0, embedded, features, positions, cache, view)
        for k in range(1, len(self.layers)):
            _, cache = self.read(k, embedded, features, positions, cache, view)
        return hidden, cache

    def read(self, k: int, embedded, features, positions, cache, view):
        """Read T slots of each row by layer k alone: its hidden states ``[B, T, D]``, and the cache of all layers with its
        new entries."""
        if self.config.mask_first:
            embedded = jnp.where(positions[:, :, None] == 0, jnp.zeros((), embedded.dtype), embedded)
        normed_inputs = [self.token_norms[k](embedded), self.feature_norms[k](features)]  # the embedding comes first
        x, layer = self.fuse_in[k](jnp.concatenate(normed_inputs, axis=-1)), self.layers[k]
        normed = x if layer.attention_norm is None else layer.attention_norm(x)
        after = self.norms[k] if self.config.norm_output else None
        _, hidden, kv = layer(x, normed, positions, cache[k], view, after)
        return hidden, (*cache[:k], kv, *cache[k + 1 :])

    def logits(self, hidden, target):
        """``[..., D] -> [..., Vd]``, by the target's output head or a part of it."""
        hidden = hidden if self.config.norm_output else self.norms[0](hidden)
        return target.logits(hidden) if self.head is None else rows_of_target(self.head, hidden, target)
