"""The decoder of all families in ``jspec.checkpoints.huggingface.families``, which differ in the choices of their
configs.

A call reads T new tokens of each row through a *view* (``jspec.models.kv_cache``), which decides where keys and values
are stored:

    hidden, cache = model(tokens, positions, cache, view)
    logits = model.logits(hidden)

``jspec.models.protocols`` lists the methods that the rest of jspec calls, and that any other target has to have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig, Shards
from jspec.models.cache_pools import KVRounding, LayerShape, cache_shape, with_rounding
from jspec.models.decoder_layer import Layer, apply_layer
from jspec.models.heads.draft_vocabulary import placeholder_ids, with_draft_tokens
from jspec.models.layers import Linear, Norm, linear_maps, looked_up, random_params, times, weight_of
from jspec.models.per_layer import LayerInputs
from jspec.models.w8a8 import with_quantized_inputs
from jspec.pallas.collectives.peers import Peers, reduce_with
from jspec.pallas.matmul import matmul
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.quantize_activations import quantize_tokens
from jspec.pallas.sums import add
from jspec.quantization.formats import format_of
from jspec.quantization.weight import Weight


class Decoder(nnx.Module):
    """Embedding, L layers, final norm and output head.

    The layers are unrolled in the compiled program. A scan over them would copy every weight in each step.

    With ``shards`` it is one shard of the model, to be called inside of ``jax.shard_map``: layers are those of
    ``shards.local(config)``, and embedding and output head have ``shards.vocabulary(V)`` tokens. It reads the same
    tokens in every shard, and gives the same hidden states and logits in each.

    Attributes:
      embedding: ``[V, D]``, or ``[V, We]`` with ``project_in`` and ``project_out``. A tied embedding is also the output
        head and is quantised if that is.
      positions: ``[Pe, D]``, the vectors that are added to embeddings, by position. None with rotary embeddings.
      project_in, project_out: the linear maps from embeddings to the layers, and from these to the output head; or None.
      head: the output head, or its part for a draft vocabulary, which every shard has. None if the embedding is tied.
      layer_inputs: the table of per-layer inputs, and the projection of embeddings to them; None without them.
      draft_ids: as in ``jspec.models.heads.draft_vocabulary``, of a draft model with a reduced vocabulary; None of any
        other, and of every target.
      embedding_form: how the embedding is stored; None for one that is not quantised.
      embedding_scale: one scale for each token, float32 ``[V]``, or those of its groups. None for an embedding that is
        not quantised.
      peers: the other GPUs, with which this one adds up and gathers; each program sets them as it begins. None leaves
        that to XLA.
      kv_rounding: of each layer, how keys and values are rounded that are cached; None if they are not.
      quantize_head_inputs: whether the hidden states that the output head reads are quantised to int8, as in an int8
        draft model.

    Example::

        from flax import nnx

        config = ModelConfig("LlamaForCausalLM", 32, 16, 32, 2, 2, 1, 8, 64)  # two layers, V = 32, D = 16
        decoder = Decoder(config, rngs=nnx.Rngs(0))
        assert len(decoder.cache_shape()) == 2
    """

    def __init__(self, config: ModelConfig, *, shards: Shards | None = None, dtype=jnp.float32, rngs: nnx.Rngs):
        V, D, W = config.vocab_size, config.hidden_size, config.embedding_size
        self.config, self.dtype, self.shards = config, dtype, shards
        self.kv_rounding: tuple[KVRounding, ...] | None = None
        local = config if shards is None else shards.local(config)
        V = V if shards is None else shards.vocabulary(V)
        tied = config.tie_embeddings
        linear = functools.partial(Linear, dtype=dtype, rngs=rngs)
        projection = linear_maps(config, "", dtype=dtype, rngs=rngs)
        self.embedding_form = format_of(config.embedding_quantization)
        params = random_params(rngs, (V, W or D), 0.02, dtype=dtype, form=self.embedding_form)
        self.embedding, self.embedding_scale = params.numbers, params.scale
        self.layers = nnx.List(
            [Layer(local, i, shards=shards, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = Norm(D, config.rms_norm_eps, config.norm, dtype=dtype) if config.final_norm else None
        rows = config.dimensions["Vd"] if config.reduced else V
        self.head = None if tied else linear(W or D, rows, quantization=config.head_quantization)
        self.draft_ids = placeholder_ids(config)
        self.draft_tokens, self.quantize_head_inputs = None, False  # before ``prepare``
        self.peers: Peers | None = nnx.data(None)
        self.project_in = None if W is None else projection("project_in", W, D)
        self.project_out = None if W is None else projection("project_out", D, W)
        self.multiplier, rows = float(np.asarray(config.embedding_multiplier).astype(dtype)), config.dimensions["Pe"]
        learned = config.position_offset is not None
        self.positions = random_params(rngs, (rows, D), 0.02, dtype=dtype).numbers if learned else None
        has_inputs = config.per_layer_inputs is not None
        self.layer_inputs = LayerInputs(config, dtype=dtype, rngs=rngs) if has_inputs else None

    def prepare(self) -> "Decoder":
        """The drafter that this model becomes, with the same arrays and the token of each logit of a draft vocabulary.
        Products with int8 weights quantise their inputs in it. A target is never prepared."""
        peers, self.peers = self.peers, None  # which cannot be copied
        drafter = with_quantized_inputs(self, head=False)
        drafter.peers = self.peers = peers
        form = self.embedding_form if self.head is None else self.head.form
        drafter.quantize_head_inputs = form == format_of("int8") and self.norm is not None
        return with_draft_tokens(drafter)

    def embed(self, tokens):
        """The embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``, without multiplier and learned positions.

        Draft heads read these: their own embeddings are copies of them."""
        rows, here = tokens, None
        if self.shards is not None:
            rows = tokens - jax.lax.axis_index(self.shards.axis) * self.embedding.shape[0]
            here = (rows >= 0) & (rows < self.embedding.shape[0])
            rows = jnp.where(here, rows, 0)
        found = looked_up(self._stored_embedding, rows)
        vectors = found.numbers if found.is_plain else found.dequantize().astype(self.dtype)
        if self.shards is not None and here is not None:  # one shard has the token, and the others add zeros
            part = PartialSums(jnp.where(here[..., None], vectors, 0)[..., None, :], reduce_axis=self.shards.axis)
            vectors = reduce_with(self.peers, part, vectors.dtype)
        return vectors if self.project_in is None else self.project_in(vectors)

    def _inputs(self, tokens, positions):
        """The inputs of the first layer, ``[B, T, D]``; arguments as for ``__call__``."""
        embedded, offset = times(self.embed(tokens), self.multiplier), self.config.position_offset
        if self.positions is None or offset is None:
            return embedded
        inside = jnp.clip(positions, 0, self.config.max_position - 1)  # invalid tokens may be anywhere
        return add(embedded, self.positions[...][inside + offset])

    def __call__(self, tokens, positions, cache, view):
        """Read T new tokens of each row: see ``LanguageModel``."""
        hidden, _, cache = self.with_auxiliary(tokens, positions, cache, view, ())
        return hidden, cache

    def with_auxiliary(self, tokens, positions, cache, view, aux_layers: tuple[int, ...]):
        """Read tokens as ``__call__`` does, and also return auxiliary hidden states: see ``Target.with_auxiliary``."""
        x = self._inputs(tokens, positions)
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        own_inputs = [None] * len(self.layers) if self.layer_inputs is None else self.layer_inputs(tokens, x)
        normed, streams, written = x if norms[0] is None else norms[0](x), [x], []
        for number, (layer, after, kv) in enumerate(zip(self.layers, norms[1:], cache, strict=True)):
            source = self.config.layer(number).reads_cache_of
            kv = kv if source is None else written[source]
            x, normed, kv = apply_layer(layer, x, normed, positions, kv, view, after, own_inputs[number], self.peers)
            streams.append(x)
            written.append(kv if source is None else None)
        return (
            normed,
            jnp.concatenate([streams[k] for k in aux_layers], axis=-1) if aux_layers else normed,
            tuple(written),
        )

    def feature_size(self, aux_layers: tuple[int, ...]) -> int:
        """E, the size of the features that ``with_auxiliary`` returns for ``aux_layers``."""
        return max(len(aux_layers), 1) * self.config.hidden_size

    def logits(self, hidden):
        """``[..., D] -> [..., V]`` in the model's dtype: see ``LanguageModel``."""
        logits = self._shard_logits(hidden)
        if self.shards is None or self.draft_ids is not None:
            return logits
        if self.peers is not None and self.peers.serve_parts(logits.shape, logits.dtype):
            gathered = _side_by_side(self.peers.all_gather(logits))
        else:
            gathered = jax.lax.all_gather(logits, self.shards.axis, axis=logits.ndim - 1, tiled=True)
        return gathered[..., : self.config.vocab_size]

    def batch_sharded_logits(self, hidden):
        """In shards: the logits of this shard's rows, ``[B, ..., D] -> [B / n, ..., V]``; each of n shards has its own
        rows."""
        return self.to_batch_shards(self._shard_logits(hidden))

    def to_batch_shards(self, logits):
        """In shards: all logits of this shard's rows, ``[B / n, ..., V]``, from those of its part of the vocabulary for
        all rows ``[B, ..., V / n]``; each of n shards has its own rows."""
        assert self.shards is not None
        parts = self.shards.count, logits.shape[0] // self.shards.count, *logits.shape[1:]
        if self.peers is not None and self.peers.serve_parts(parts[1:], logits.dtype):
            rows = _side_by_side(self.peers.all_to_all(logits.reshape(parts)))
        else:
            rows = jax.lax.all_to_all(logits, self.shards.axis, split_axis=0, concat_axis=logits.ndim - 1, tiled=True)
        return rows[..., : self.config.vocab_size]

    def _shard_logits(self, hidden):
        """The logits of the shard's part of the vocabulary, for all rows."""
        hidden = self.before_head(hidden)
        hidden = quantize_tokens(hidden) if self.quantize_head_inputs else hidden
        return self.scaled_logits(matmul(hidden, self.output_weight))

    def before_head(self, hidden):
        """The inputs of the output head for hidden states ``[..., D]``: they themselves, or ``[..., We]``."""
        return hidden if self.project_out is None else self.project_out(hidden)

    def scaled_logits(self, products):
        """Logits ``[..., V]`` from the products of the output head, in their dtype: divided and capped as the config
        says."""
        cap, divisor = self.config.logit_softcap, self.config.logit_divisor
        if cap is None:
            return products if divisor == 1 else times(products, 1 / divisor)
        return (cap * jnp.tanh(products.astype(jnp.float32) / (divisor * cap))).astype(products.dtype)

    @property
    def output_weight(self) -> Weight:
        """The weight ``[V, D]`` of the output head, ``[V, We]`` behind ``project_out``. A tied output head is the
        embedding."""
        return self._stored_embedding if self.head is None else self.head.stored

    @property
    def _stored_embedding(self) -> Weight:
        width = self.config.embedding_size or self.config.hidden_size
        return weight_of(self.embedding, self.embedding_scale, form=self.embedding_form, inputs=width)

    @property
    def output_norm(self) -> jax.Array:
        """The factors of the final norm, ``[D]``; ones if there is no such norm."""
        return jnp.ones(self.config.hidden_size, self.dtype) if self.norm is None else self.norm.scale

    def cache_shape(self) -> tuple[LayerShape, ...]:
        """What each layer caches for a token, in all shards together; None for layers that cache nothing."""
        shapes = cache_shape(self.config, 1 if self.shards is None else self.shards.count)
        return shapes if self.kv_rounding is None else with_rounding(shapes, self.kv_rounding)


def _side_by_side(parts) -> jax.Array:
    """``[n, ..., m] -> [..., n m]``."""
    return jnp.moveaxis(parts, 0, -2).reshape(*parts.shape[1:-1], -1)
