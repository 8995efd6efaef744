"""Block drafters (DFlash, DFlash2, JetSpec, DSpark, Domino, LiLiCorr, XPress; 2026): layers fill a block in one pass.

The *context* of a block are the tokens before its first slot, the anchor. All layers compute their keys and values of
the context from its fused features (``fuse``), so the context goes through neither attention nor MLPs.

    context = head.fuse(features)                                    # [B, C, D]
    cache = head.write_kv(context, positions, cache, view)           # the context of a prompt
    hidden, cache = head(context, head.embed(block, target), positions, cache, view)  # new context, then the block
    logits = head.draft_logits(hidden, target)                       # [B, n, Vd], over the draft vocabulary

The Markov head of a DSpark head adds to the logits of a slot by the draft before it, so drafts are drawn one after
another (``MarkovHead``). DFlash2, Domino and LiLiCorr heads have something of the kind, too, each in a module of its own.
``BlockHead.sequential`` is whichever a head has, with the interface of ``jspec.models.heads.sequential``. The refiner of an
XPress head adds to the logits of all slots by all drafts, in a few passes (``jspec.models.heads.refiner``)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import BlockConfig
from jspec.models.cache_pools import LayerKV
from jspec.models.decoder_layer import Layer
from jspec.models.heads.dflash2 import CandidateSelector, ConvolvedLayer
from jspec.models.heads.domino import Domino
from jspec.models.heads.draft_vocabulary import placeholder_ids, with_draft_tokens
from jspec.models.heads.eagle import LayeredHead, init_embedding
from jspec.models.heads.lilicorr import LiLiCorr
from jspec.models.heads.refiner import Refiner
from jspec.models.heads.sequential import Slots
from jspec.models.kv_cache import PagedView
from jspec.models.layers import Linear, Norm, linear_maps, looked_up
from jspec.models.w8a8 import with_quantized_inputs
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.table import paged_attention
from jspec.pallas.matmul import matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockView(PagedView):
    """A view that writes new tokens of the context, and in which a block behind them attends.

    Keys and values of the block are written, too, behind the context. Later writes replace them: the context of the next
    round begins where the block did, at the latest.

    Attributes:
      block: n, how many of the call's tokens are the block; they are the last.
      causal: whether a slot of the block sees none of the slots behind it. If not, it sees all valid ones.
      from_anchor: whether a window counts tokens before the anchor, and not slots up to the own.
    """

    block: int = dataclasses.field(default=1, metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    from_anchor: bool = dataclasses.field(default=False, metadata={"static": True})

    def extend(self, qkv, rotation: Rotation | None, kv: LayerKV, num_kv_heads: int, spec: AttentionSpec):
        """As ``View.extend``, with the attention of the block alone, ``[B, n, N, H]``.

        With a window W, a slot sees W tokens of the context if windows are counted from the anchor, else those of the W
        newest slots up to its own that are of the context."""
        n, W = self.block, spec.window
        q, kv = self.rope_and_write_kv(qkv, rotation, kv, num_kv_heads)
        last, valid = self.positions[:, -n:], self.valid[:, -n:]

        def attended(slots: slice, window: int | None):
            queries = PagedQueries(self.table, last[:, slots], valid[:, slots])
            return paged_attention(q[:, -n:][:, slots], kv.k, kv.v, queries, dataclasses.replace(spec, window=window))

        if not self.causal:
            newest = jnp.max(jnp.where(valid, last, -1), axis=1, keepdims=True)
            last = jnp.broadcast_to(newest, last.shape)
        if W is None or self.causal != self.from_anchor:
            return attended(slice(None), W if W is None or self.causal else W + n), kv
        # Each slot sees as far as no other from where its keys end, and so has a window, and a pass, of its own.
        widths = range(W + 1, W + n + 1) if self.causal else range(W + n - 1, W - 1, -1)
        return jnp.concatenate([attended(slice(i, i + 1), width) for i, width in enumerate(widths)], axis=1), kv


class MarkovHead(nnx.Module):
    """The logits that a DSpark head adds to those of a draft, by the draft before it; ``BlockConfig.markov`` has the
    kinds.

    Attributes:
      embedding: ``[V, Rm]``, of the draft before.
      out: the map to logits ``[Rm] -> [Vd]``.
      gate: reads hidden state and embedding, of the kind ``gated``.
      cell: reads state, embedding and hidden state, of the kind ``rnn``.
    """

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs):
        V, D, Rm = config.layers.vocab_size, config.layers.hidden_size, config.markov_rank
        self.rank = Rm
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (V, Rm), dtype))
        linear = linear_maps(config.layers, "markov.", dtype=dtype, rngs=rngs)
        self.out = linear("out", Rm, config.draft_vocab_size)
        self.gate = linear("gate", D + Rm, Rm, bias=True) if config.markov == "gated" else None
        self.cell = linear("cell", D + 2 * Rm, 3 * Rm, bias=True) if config.markov == "rnn" else None

    def start(self, slots: Slots):
        """See ``jspec.models.heads.sequential``."""

        def read(state, previous, i: int):
            added, state = self(slots.hidden[:, i : i + 1], previous, state)
            return state, slots.logits[:, i : i + 1] + added

        return self.no_state(len(slots.hidden)), read

    def no_state(self, rows: int) -> jax.Array:
        """The state before the first draft of a block, ``[B, 1, Rm]``."""
        return jnp.zeros((rows, 1, self.rank), self.embedding.dtype)

    def __call__(self, hidden, previous, state):
        """The logits to be added to those of a slot.

        Args:
          hidden: ``[B, 1, D]``, of the slot, after the final norm.
          previous: int32 ``[B, 1]``, the draft before, or the anchor.
          state: ``[B, 1, Rm]``, of the cell before this slot.

        Returns:
          ``[B, 1, Vd]``, and the state behind this slot.
        """
        read, state = self.read(hidden, previous, state)
        return self.out(read), state

    def read(self, hidden, previous, state):
        """The inputs of ``out``, ``[B, 1, Rm]``, and the state behind the slot; arguments as above.

        In training the axis of slots is that of blocks, and may have any size: each is the same slot of another
        block."""
        read = embedded = looked_up(self.embedding[...], previous)
        if self.gate is not None:
            read = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, embedded], axis=-1))) * embedded
        elif self.cell is not None:
            gates = self.cell(jnp.concatenate([state, embedded, hidden], axis=-1))
            forget, new, read = jnp.split(gates, 3, axis=-1)
            forget, read = jax.nn.sigmoid(forget), jnp.tanh(read)
            state = forget * state + (1 - forget) * jnp.tanh(new)
        return read, state


class BlockHead(LayeredHead):
    """The fusion of auxiliary hidden states, the layers, and the heads for logits.

    Attributes:
      draft_ids: as in ``jspec.models.heads.draft_vocabulary``; None if every token can be proposed.
      markov: of a DSpark head; None in others.
      selector: of a DFlash2 head; None in others.
      domino, lilicorr: of these two kinds of heads; None in others.
      refiner: of an XPress head; None in others.
      confidence: a linear map of the inputs that ``BlockConfig.confidence`` names to a logit: that of the probability
        that the draft of a slot is accepted if those before it are. None in a head without.
    """

    def __init__(self, config: BlockConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        c, D, Rm, E = config.layers, config.layers.hidden_size, config.markov_rank, config.dimensions["E"]
        self.config = config
        self.embedding = init_embedding(c, rngs, dtype) if config.own_embedding else None
        linear = linear_maps(c, "", dtype=dtype, rngs=rngs)
        self.fuse_in = linear("fuse_in", E, D)
        self.context_norm = Norm(D, c.rms_norm_eps, dtype=dtype)
        layer = functools.partial(ConvolvedLayer, config) if config.conv_taps else functools.partial(Layer, c)
        self.layers: Any = nnx.List([layer(i, dtype=dtype, rngs=rngs) for i in range(c.num_layers)])
        self.norm = Norm(D, c.rms_norm_eps, dtype=dtype)
        self.head = linear("head", D, config.draft_vocab_size) if config.own_head else None
        self.draft_ids = placeholder_ids(config)
        self.draft_tokens = None  # before ``prepare``
        self.markov = MarkovHead(config, dtype=dtype, rngs=rngs) if config.markov is not None else None
        self.refiner = Refiner(config, dtype=dtype, rngs=rngs) if config.refiner_rank else None
        self.selector = CandidateSelector(config, dtype=dtype, rngs=rngs) if config.is_dflash2 else None
        self.domino = Domino(config, dtype=dtype, rngs=rngs) if config.domino is not None else None
        self.lilicorr = LiLiCorr(config, dtype=dtype, rngs=rngs) if config.lilicorr is not None else None
        sizes = {None: 0, "hidden": D, "markov": D + Rm}
        read = sizes[config.confidence]
        self.confidence = Linear(read, 1, bias=True, dtype=dtype, rngs=rngs) if read else None

    @property
    def sequential(self) -> Any:
        """How each draft depends on those before it, as ``jspec.models.heads.sequential`` says; None if it does not."""
        kinds = self.markov, self.selector, self.domino, self.lilicorr
        return next((kind for kind in kinds if kind is not None), None)

    def fuse(self, features):
        """Context ``[..., D]`` from joined auxiliary hidden states ``[..., E]``."""
        return self.context_norm(self.fuse_in(features))

    def write_kv(self, context, positions, cache, view):
        """The cache with keys and values of context ``[B, C, D]`` at int32 positions ``[B, C]``."""
        pairs = zip(self.layers, cache, strict=True)
        return tuple(layer.attention.write_kv(context, positions, kv, view) for layer, kv in pairs)

    def __call__(self, context, embedded, positions, cache, view: BlockView):
        """Write new context and read a block behind it.

        Args:
          context: ``[B, C, D]``, fused.
          embedded: ``[B, n, D]``, the embeddings of anchor and mask tokens.
          positions: int32 ``[B, C + n]``, of both.
          cache: the keys and values of each layer.
          view: of the same positions.

        Returns:
          the hidden state of each slot of the block ``[B, n, D]``, after the final norm, and the cache.
        """
        x, normed, written = embedded, self.layers[0].attention_norm(embedded), []
        norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        for layer, after, causal, kv in zip(self.layers, norms, self.config.causal, cache, strict=True):
            anchored = self.config.windows_from_anchor if causal else not self.config.windows_by_slot
            seen = dataclasses.replace(view, causal=causal, from_anchor=anchored)
            x, normed, kv = layer(x, jnp.concatenate([context, normed], axis=1), positions, kv, seen, after)
            written.append(kv)
        return normed, tuple(written)

    def draft_logits(self, hidden, target):
        """``[..., D] -> [..., Vd]``, over the draft vocabulary, without what ``sequential`` changes."""
        return target.logits(hidden) if self.head is None else self.head(hidden)

    def confidence_logits(self, hidden, previous):
        """The logit of each slot's acceptance probability by the confidence head, float32 ``[B, n]``.

        Args:
          hidden: ``[B, n, D]``, after the final norm.
          previous: int32 ``[B, n]``, the draft before each slot, or the anchor.
        """
        assert self.confidence is not None
        read = hidden
        if self.config.confidence == "markov":
            assert self.markov is not None
            read = jnp.concatenate([hidden, self.markov.embedding[...][previous]], axis=-1)
        assert self.confidence.bias is not None
        logits = matmul(read.astype(jnp.float32), self.confidence.weight[...].astype(jnp.float32))
        return (logits + self.confidence.bias[...].astype(jnp.float32).reshape(1, 1, -1))[..., 0]

    def prepare(self) -> "BlockHead":
        """The draft head that serves, with the same arrays and the token of each logit."""
        return with_draft_tokens(with_quantized_inputs(self, concatenated=True))
