"""Reference implementation of every kind of draft head: its proposals, computed by causal passes over whole texts.

Nothing is cached.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.config.heads import (
    AssistantConfig,
    BlockConfig,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
    MLPConfig,
    MTPConfig,
    PardConfig,
)
from jspec.models.cache_pools import without_slots
from jspec.models.heads.draft_vocabulary import tokens_of
from jspec.models.kv_cache import CausalView, View
from jspec.pallas.attention.reference import apply_rope, grouped_attention
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.sampling.warped_logits import over_vocabulary
from jspec.sampling.distribution import Distribution


class Drafts(NamedTuple):
    """The drafts after the first ``length`` tokens of a text.

    Attributes:
      logits: ``[B, K, V]``. Those of draft i assume that the drafts before it are the next tokens of the text.
      kv: keys and values of the draft head's slots, ``[G, B, S, H]`` for each layer. () for a draft head that caches none.
      real: int32 ``[B]``, how many slots, from the first on, read committed tokens and true features of the target only.
    """

    logits: jax.Array
    kv: Any
    real: jax.Array


def causal_drafts(config: HeadConfig, head, target, text, length, K: int) -> Drafts:
    """The K drafts after the first ``length`` tokens of each text.

    After a single token there is no feature yet, so that the logits mean nothing, except those of a PARD model.

    Args:
      config: config of the draft head.
      head: the draft head, before ``prepare``.
      target: the target.
      text: int32 ``[B, S]``, with S at least length + K - 1.
      length: int32 ``[B]``.
      K: the number of drafts.
    """
    drafts = _drafts(config, head, target, text, length, K)
    ids = getattr(head, "draft_ids", None)
    return drafts if ids is None else drafts._replace(logits=over_vocabulary(drafts.logits, ids[...]))


def logits_of(distribution: Distribution) -> jax.Array:
    """The logits of drafts, ``[B, K, V]``, from the distributions that a drafter says they were drawn from."""
    logits, ids = distribution.warped.logits, distribution.draft_ids
    return logits if ids is None else over_vocabulary(logits, ids)


def _drafts(config: HeadConfig, head, target, text, length, K: int) -> Drafts:
    """The same with logits over the draft vocabulary, ``[B, K, Vd]``."""
    if isinstance(config, PardConfig):
        return _pard(config, head, text, length, K)
    features = _features(config, target, text)
    if isinstance(config, BlockConfig):
        return _block(config, head, target, features, text, length, K)
    if isinstance(config, AssistantConfig):
        return _assistant(config, head, target, text, length, K)
    if isinstance(config, MLPConfig):
        return _mlp(head, features, text, length, K)
    if isinstance(config, MedusaConfig):
        return Drafts(head.logits(_at(features, length - 2), target, K)[:, 0], (), length - 1)
    following = jnp.roll(text, -1, axis=1)  # slot i reads token i + 1
    if isinstance(config, MTPConfig) and config.layers.num_layers > 1:
        return _chain_of_layers(head, target, features, following, length, K)
    if isinstance(config, EagleConfig | MTPConfig) or config.mask_token_id is None:
        return _chain(head, target, features, following, length, K)
    return _masked(config, head, target, features, following, length, K)


def _chain(head, target, features, following, length, K: int) -> Drafts:
    """One pass of the whole draft head for each draft. Each pass reads one more of its own outputs instead of a feature."""
    embedded, rows, slot = head.embed(following, target), jnp.arange(len(length)), _positions(following)[:, :, None]

    def draft(fused, i):
        newest = length - 2 + i
        # The attention gives later slots a weight of 0, but 0 x NaN is NaN.
        known = jnp.where(slot <= newest[:, None, None], embedded, 0)
        hidden, kv = _read(head, known, fused)
        hidden = _at(hidden, newest)
        return fused.at[rows, newest + 1].set(head.recycle(hidden)[:, 0]), (head.logits(hidden, target)[:, 0], kv)

    _, (logits, written) = jax.lax.scan(draft, head.fuse(features), jnp.arange(K, dtype=jnp.int32))
    return Drafts(jnp.moveaxis(logits, 0, 1), jax.tree.map(lambda kv: kv[0], written), length - 1)


def _chain_of_layers(head, target, features, following, length, K: int) -> Drafts:
    """As ``_chain``, with another layer for each draft until there is none; every layer has read the true features."""
    rows, slot = jnp.arange(len(length)), _positions(following)[:, :, None]
    embedded, last, drafts = head.embed(following, target), head.config.layers.num_layers - 1, []
    positions, none = _positions(following), (None,) * (last + 1)
    _, written = head(embedded, features, positions, none, CausalView(positions))
    for i in range(K):
        newest = length - 2 + i
        known = jnp.where(slot <= newest[:, None, None], embedded, 0)
        hidden, _ = head.read(min(i, last), known, features, positions, none, CausalView(positions))
        hidden = _at(hidden, newest)
        features = features.at[rows, newest + 1].set(head.recycle(hidden)[:, 0])
        drafts.append(head.logits(hidden, target))
    return Drafts(jnp.concatenate(drafts, axis=1), written, length - 1)


def _masked(config, head, target, features, following, length, K: int) -> Drafts:
    mask = jnp.arange(following.shape[1], dtype=jnp.int32)[None] > length[:, None] - 2
    embedded = head.embed(jnp.where(mask, config.mask_token_id, following), target)
    fused = jnp.where(mask[:, :, None], head.fuse(head.mask_hidden[...].reshape(1, 1, -1)), head.fuse(features))
    hidden, kv = _read(head, embedded, fused)
    hidden = jnp.concatenate([_at(hidden, length - 2 + i) for i in range(K)], axis=1)
    return Drafts(head.logits(hidden, target), kv, length - 1)


def _block(config, head, target, features, text, length, K: int) -> Drafts:
    """A block behind a context, in one softmax over both. Slots at positions that the draft head does not have are no part
    of the block."""
    first, S = (0 if config.anchor_first else 1), text.shape[1]
    n = first + K if all(config.causal) and config.lilicorr is None and not config.refiner_rank else config.block_size
    anchor, place = length[:, None] - 1, jnp.arange(n, dtype=jnp.int32)[None]
    tokens = jnp.where(place == 0, jnp.take_along_axis(text, anchor, axis=1), config.mask_token_id)
    positions = jnp.concatenate([_positions(text), anchor + place], axis=1)
    fused, x, written = head.fuse(features), head.embed(tokens, target), []
    for i, layer in enumerate(head.layers):
        a = layer.attention
        slots, finish = _convolved(config, getattr(layer, "attention_conv", None), layer.attention_norm(x))
        qkv, _, rotation = a._projected(jnp.concatenate([fused, slots], axis=1), positions)
        q, k, v = jnp.split(qkv, [a.num_heads, a.num_heads + a.num_kv_heads], axis=2)
        q, k = (apply_rope(part, rotation) for part in (q, k))
        seen = _seen(config, i, positions, anchor, S)
        k, v = (jnp.moveaxis(part, 2, 0) for part in (k, v))
        written.append((k[:, :, :S], v[:, :, :S]))
        v = jnp.where(jnp.any(seen, axis=1)[None, :, :, None], v, 0)  # what nobody sees may be NaN
        x = x + finish(a.out(grouped_attention(q[:, S:], k, v, seen, AttentionSpec()).reshape(len(x), n, -1)))
        slots, finish = _convolved(config, getattr(layer, "mlp_conv", None), layer.mlp_norm(x))
        x = x + finish(layer.mlp(slots))
    block = head.norm(x)
    hidden = block[:, first:]
    if config.lilicorr is not None:
        known = anchor + place[:, first:] < config.layers.max_position
        return Drafts(_of_lattice(head, target, features, hidden, known, text, length, K), written, length - 1)
    hidden = hidden[:, :K]
    logits = head.draft_logits(hidden, target)
    if config.domino is not None:
        logits = logits + _of_recurrence(head, target, hidden, text, length, K)
    if head.refiner is not None:
        there = positions[:, S:, None] < config.layers.max_position
        mean = jnp.sum(jnp.where(there, block, 0), axis=1, keepdims=True) / jnp.sum(there, axis=1, keepdims=True)
        logits = refined_logits(config, head, block, mean, logits, text, length)
    if head.markov is not None:
        state, added = head.markov.no_state(len(text)), []
        for i in range(K):
            one, state = head.markov(hidden[:, i : i + 1], _at(text, length - 1 + i), state)
            added.append(one)
        logits = logits + jnp.concatenate(added, axis=1)
    if head.selector is not None:
        logits = jnp.stack([_selected(head, logits, hidden, text, length, i) for i in range(K)], axis=1)
    return Drafts(logits, written, length - 1)


def refined_logits(config, head, block, mean, logits, text, length):
    """The logits of all drafts after as many passes as ``config`` says, slot by slot."""
    refiner, K, R, first = head.refiner, logits.shape[1], config.refiner_rank, 0 if config.anchor_first else 1
    of_block = refiner.read(mean)[:, :, R:]
    known, refined = [_at(text, length - 1 - back) for back in range(first, -1, -1)], logits
    ids = tokens_of(head.draft_ids[...], config.draft_vocab_size) if config.reduced else jnp.arange(logits.shape[-1])
    for _ in range(config.refine_passes):
        drafts = ids[jnp.argmax(refined, axis=-1)]
        previous = jnp.concatenate([*known, drafts], axis=1)
        joined, added = [], []
        for t in range(first + K):
            own = refiner.read(block[:, t : t + 1])[:, :, :R]
            a = refiner.join(jnp.concatenate([own, of_block, refiner.embedding[...][previous[:, t : t + 1]]], axis=-1))
            joined.append(a)
            c = a + sum(refiner.mix[...][None, None, :, t, s] * joined[s] for s in range(t + 1))
            gate, up = jnp.split(refiner.gate_up(c), 2, axis=-1)
            added.append(refiner.out(c + refiner.down(jax.nn.silu(gate) * up)))
        refined = logits + jnp.concatenate(added[first:], axis=1)
    return refined


def _convolved(config, conv, x):
    """What a sublayer reads of slots ``[B, n, D]``, and a function of what it returns; nothing is changed without ``conv``.

    Slot by slot: a slot adds up itself and those before it, each times a kernel of its own."""
    if conv is None:
        return x, lambda y: y
    n, shape = x.shape[1], (2, config.conv_taps, config.dimensions["Gc"])

    def side(which, y):
        rows = []
        for t in range(n):
            delta = conv.kernel_projection(x[:, t : t + 1]).reshape(-1, *shape)[:, which]
            kernel = conv.base_kernel[...][which][None] + jnp.repeat(delta, config.conv_group, axis=2)
            rows.append(sum(kernel[:, back] * y[:, t - back] for back in range(min(config.conv_taps, t + 1))))
        return jnp.stack(rows, axis=1)

    return side(0, x), lambda y: side(1, y)


def _selected(head, logits, hidden, text, length, i: int):
    """The scores of all tokens for draft i, ``[B, V]``, by the token before it: -inf for those that are no candidates."""
    chosen, unary = head.selector, logits[:, i]
    gate = chosen.predecessors[...][_at(text, length - 1 + i)[:, 0]] * chosen.project(hidden[:, i : i + 1])[:, 0]
    least = jnp.sort(unary, axis=-1)[:, -head.config.candidates]
    return jnp.where(unary >= least[:, None], unary + gate @ chosen.successors[...].T, -jnp.inf)


def _of_recurrence(head, target, hidden, text, length, K: int):
    """What a Domino head adds to the logits of drafts, ``[B, K, Vd]``; its recurrence one gate after another."""
    own, state, added = head.domino, jnp.zeros((len(text), head.domino.size)), []
    sizes = slice(0, own.size), slice(own.size, 2 * own.size), slice(2 * own.size, None)
    for i in range(K):
        token = head.embed(_at(text, length - 1 + i), target)
        reset, keep, new = (own.of_token(token)[:, 0, part] for part in sizes)
        of_state = own.of_state(state[:, None])[:, 0]
        keep = 1 / (1 + jnp.exp(-keep - of_state[:, sizes[1]]))
        new = jnp.tanh(new + of_state[:, sizes[2]] / (1 + jnp.exp(-reset - of_state[:, sizes[0]])))
        state = keep * state + (1 - keep) * new
        inner = own.inner(jnp.concatenate([hidden[:, i], state], axis=-1)[:, None])
        added.append(own.out(inner / (1 + jnp.exp(-inner))) * (i >= head.config.domino.uncorrected))
    return jnp.concatenate(added, axis=1)


def _of_lattice(head, target, features, hidden, known, text, length, K: int):
    """The scores of a LiLiCorr head for all tokens, ``[B, K, V]``, by way of all pairs of candidates."""
    own, (B, n, _), k = head.lilicorr, hidden.shape, head.config.candidates
    logits = head.draft_logits(hidden, target)
    tokens = jnp.argsort(-logits, axis=-1, stable=True)[..., :k]
    likely = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens, axis=-1)
    rank = jnp.broadcast_to(jnp.arange(k), likely.shape)
    features_of = [likely, jnp.exp(likely), likely - likely[..., :1], rank / max(k - 1, 1), rank == 0]
    normed = own.feature_mlp["0"](jnp.stack([x.astype(jnp.float32) for x in features_of], axis=-1))
    silu = lambda x: x / (1 + jnp.exp(-x))  # noqa: E731
    x = head.embed(tokens.reshape(B, -1), target).reshape(B, n, k, -1)
    x = x if own.token_proj is None else own.token_proj(x)
    x = x + own.pass_hidden_proj(hidden)[:, :, None] + own.feature_mlp["3"](silu(own.feature_mlp["1"](normed)))
    x = (x + own.slot_embedding[0] + own.rank_embedding[0]).reshape(B, n * k, -1)
    slot = jnp.repeat(jnp.arange(n), k)
    distance = slot[:, None] - slot[None]
    bias = own.relative_slot_bias[:, distance + n] + (distance == 0)[None] * own.same_slot_bias[:, None, None]
    seen = jnp.repeat(known, k, axis=1)
    bias = jnp.where(seen[:, None, None], bias[None], -1e30)
    x = jnp.where(seen[..., None], x, 0)  # of which nobody sees anything
    for layer in own.layers:
        q, key, v = (
            part.reshape(B, n * k, layer.num_heads, -1)
            for part in jnp.split(layer.attn["in_proj"](layer.attn_norm(x)), 3, axis=-1)
        )
        weights = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, key) * q.shape[-1] ** -0.5 + bias, axis=-1)
        x = x + layer.attn["out_proj"](jnp.einsum("bnqk,bknh->bqnh", weights, v).reshape(x.shape))
        x = x + layer.mlp["2"](silu(layer.mlp["0"](layer.mlp_norm(x))))
    anchor = own.anchor_norm(own.context_proj(head.fuse(_at(features, length - 2))))
    x, unit = own.output_norm(x), lambda x: x / jnp.maximum(jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)), own.eps)
    factors = silu(own.factor_input_proj(jnp.concatenate([x, jnp.broadcast_to(anchor, x.shape), x * anchor], axis=-1)))
    outs, ins = (unit(to(factors)).reshape(B, n, k, -1) for to in (own.out_head, own.in_head))
    start = own.scale * jnp.einsum("brf,bkf->bk", unit(own.anchor_out_head(anchor)), ins[:, 0])
    pairs = own.scale * jnp.einsum("bnif,bnjf->bnij", outs[:, :-1], ins[:, 1:])
    rows, found = jnp.arange(B)[:, None], []
    for i in range(K):
        scores = start
        if i:
            before = tokens[:, i - 1] == _at(text, length - 1 + i)
            row = jnp.take_along_axis(pairs[:, i - 1], jnp.argmax(before, axis=1)[:, None, None], axis=1)[:, 0]
            scores = jnp.where(jnp.any(before, axis=1, keepdims=True), row, likely[:, i])
        found.append(jnp.full((B, logits.shape[-1]), -jnp.inf).at[rows, tokens[:, i]].set(scores))
    return jnp.stack(found, axis=1)


def _seen(config, layer: int, positions, anchor, S: int):
    """Which of the S tokens of a text and of the slots behind them each slot of a block sees, bool ``[B, n, S + n]``."""
    causal, window, max_position = config.causal[layer], config.layers.windows[layer], config.layers.max_position
    key, query = positions[:, None], positions[:, S:, None]
    of_context = jnp.arange(positions.shape[1])[None, None] < S
    seen = jnp.where(of_context, key < anchor[:, None], key < max_position)
    if causal:
        seen = seen & (of_context | (key <= query))
        if window is not None and config.windows_from_anchor:
            return seen & (~of_context | (key >= anchor[:, :, None] - window))
        return seen if window is None else seen & (key > query - window)
    seen = jnp.broadcast_to(seen, (len(key), query.shape[1], key.shape[2]))
    if window is None:
        return seen
    last = jnp.max(jnp.where(positions[:, S:] < max_position, positions[:, S:], -1), axis=1)[:, None, None]
    n = query.shape[1]
    newer = jnp.arange(n)[None, :, None] + 1 if config.windows_by_slot else 0
    return seen & (~of_context | (key > last - window - n + newer))


def _pard(config, model, text, length, K: int) -> Drafts:
    positions = _positions(text)
    tokens = jnp.where(positions >= length[:, None], config.mask_token_id, text)
    hidden, kv = model(tokens, positions, (None,) * config.model.num_layers, CausalView(positions))
    hidden = jnp.concatenate([_at(hidden, length - 1 + i) for i in range(K)], axis=1)
    return Drafts(model.logits(hidden), kv, length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Newest(View):
    """Attention of one token of each row over whole texts ``[G, B, S, H]``, up to slot ``last``, int32 ``[B]``."""

    last: jax.Array

    def attend(self, q, kv, spec: AttentionSpec):
        slot, last = jnp.arange(kv.k.shape[2], dtype=jnp.int32)[None, None], self.last[:, None, None]
        seen = slot <= last if spec.window is None else (slot <= last) & (slot > last - spec.window)
        return grouped_attention(q, kv.k, kv.v, seen, spec)


def _assistant(config, head, target, text, length, K: int) -> Drafts:
    """Queries over keys and values of a causal pass of the target; those of drafts are in it, and are not seen."""
    positions, layers = _positions(text), target.config.num_layers
    _, features, written = target.with_auxiliary(text, positions, (None,) * layers, CausalView(positions), ())
    caches = [written[source] for source in config.sources(target.config)]
    hidden, logits = _at(features, length - 2), []
    for i in range(K):
        embedded = target.embed(_at(text, length - 1 + i))
        normed, hidden = head(embedded, hidden, length[:, None] - 1, caches, _Newest(length - 2))
        logits.append(head.logits(normed))
    return Drafts(jnp.concatenate(logits, axis=1), (), length - 1)


def _mlp(head, features, text, length, K: int) -> Drafts:
    state, logits = head.start(_at(features, length - 2)), []
    for i in range(K):
        state = head.stage(i, state, _at(text, length - 1 + i))
        logits.append(head.logits(i, state))
    return Drafts(jnp.concatenate(logits, axis=1), (), length - 1)


def _features(config, target, text):
    """The target's features at all positions, ``[B, S, E]``."""
    positions = _positions(text)
    aux_layers = config.resolved_aux_layers(target.config) if config.decoder else ()
    view = CausalView(positions)
    return target.with_auxiliary(text, positions, without_slots(target.cache_shape()), view, aux_layers)[1]


def _read(head, embedded, fused):
    positions = _positions(embedded)
    return head(embedded, fused, positions, (None,) * head.config.layers.num_layers, CausalView(positions))


def _positions(like):
    return jnp.broadcast_to(jnp.arange(like.shape[1], dtype=jnp.int32)[None], like.shape[:2])


def _at(values, index):
    """The entry at ``index``: ``[B, S, ...], [B] -> [B, 1, ...]``. A negative index gives an arbitrary entry."""
    return jnp.take_along_axis(values, jnp.maximum(index, 0).reshape(-1, *(1,) * (values.ndim - 1)), axis=1)
