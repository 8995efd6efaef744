"""A new draft head for a target: its config, its training objective, and its initial weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec._validation import is_int, require
from jspec.config import ModelConfig, Rope
from jspec.config.heads import (
    BlockConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    MLPConfig,
    MTPConfig,
    default_aux_layers,
)
from jspec.config.heads.block import MARKOVS
from jspec.models import flat_params, init
from jspec.models.protocols import Target
from jspec.registry import resolve, trained
from jspec.train.block import FilledBlocks
from jspec.train.eagle import ConditionalDrop, FeatureRegression, MultiTokenPrediction, TrainingTimeTest
from jspec.train.objectives import Objective
from jspec.train.stages import EachMedusaHead, EachStage

LOSSES = ("published", "soft")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes and options of a new draft head. None takes the default; where none is named, that is the target's size.

    Attributes:
      num_draft_tokens: how many tokens of a round the head learns to draft. By default 7 for eagle3 and 3 for mtp, where it
        is the number of passes; 8 for parallel, and 7 for dspark and dflash, where one pass makes them all; 4 for mlp, the
        number of its stages; and 3 for medusa, the number of Medusa heads.
      layers: how many decoder layers the head has. By default 1 for eagle3, 4 for parallel, and 5 for dspark and dflash.
      intermediate_size: F, the MLP width of these layers.
      draft_vocab_size: Vd, how many tokens the head can draft, which are the most frequent of the data. By default all
        of the target's vocabulary, but at most 32,000 for eagle3 and parallel. A dspark or dflash head that can draft all
        tokens has no output head of its own, and uses the target's.
      aux_layers: after which layers of the target the head reads auxiliary hidden states; k means after k layers. By
        default 2, L // 2 and L - 3, and for dspark and dflash five layers from 2 to L - 2.
      inner_size: the width of an MLP speculator's state.
      tie: whether the stages of an MLP speculator share their weights.
      borrow_head: whether Medusa heads use the target's output head and have none of their own.
      markov: the Markov head of a dspark head: ``vanilla``, which is the default, ``gated`` or ``rnn``; see
        ``jspec.config.heads.BlockConfig``.
      markov_rank: Rm, the rank of the Markov head. By default 256.
      loss: what a dspark or dflash head learns from. ``published``, the default, is the loss of the method's authors.
        ``soft`` compares all drafts with the target's distributions by their cross-entropy, as the other methods do.
      anchor_spacing: a window of n tokens fills n / ``anchor_spacing`` blocks of a dspark or dflash head. By default 8.

    Example::

        sizes = Sizes(num_draft_tokens=7, layers=3, markov="vanilla", markov_rank=32)  # of a DSpark head
    """

    num_draft_tokens: int | None = None
    layers: int | None = None
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    aux_layers: tuple[int, ...] | None = None
    inner_size: int | None = None
    tie: bool = False
    borrow_head: bool = False
    markov: str | None = None
    markov_rank: int | None = None
    loss: str | None = None
    anchor_spacing: int | None = None


def make_objective(method: str, target: ModelConfig, sizes: Sizes) -> Objective:
    """The training objective of a new draft head for ``target``, with the head's config.

    Args:
      method: the name of a method that ``jspec train`` trains.
      target: the target's config.
      sizes: what was chosen about the head.

    Raises:
      ValueError: a size is out of range, or heads of this method do not have it.

    Example::

        from jspec.config import ModelConfig

        target = ModelConfig("LlamaForCausalLM", 32, 16, 32, 2, 2, 1, 8, 64)
        objective = make_objective("mlp", target, Sizes(num_draft_tokens=3, inner_size=8))
        assert objective.config.num_stages == 3
    """
    methods = trained()
    require(method in methods, "method", method, f"one of {', '.join(methods)}")
    for field in dataclasses.fields(Sizes):
        value = getattr(sizes, field.name)
        if value not in (None, False) and field.name not in methods[method].sizes:
            raise ValueError(f"{field.name}={value!r}: expected nothing, a head of method {method!r} has no such size")
    K = sizes.num_draft_tokens
    require(K is None or (is_int(K) and K >= 1), "num_draft_tokens", K, "an integer of at least 1")
    return resolve(methods[method].objective or "")(target, sizes)


def eagle(target: ModelConfig, sizes: Sizes) -> Objective:
    """The objective of an EAGLE head."""
    return FeatureRegression(EagleConfig(_eagle_layer(target, sizes)))


def eagle3(target: ModelConfig, sizes: Sizes) -> Objective:
    """The objective of an EAGLE-3 head, which reads its own outputs in training."""
    depths = sizes.num_draft_tokens or 7
    config = _eagle3_config(target, sizes, layers=1, mask_token_id=None, depths=depths)
    return TrainingTimeTest(config, config.resolved_aux_layers(target), depths)


def parallel(target: ModelConfig, sizes: Sizes) -> Objective:
    """The objective of a P-EAGLE head."""
    depths = sizes.num_draft_tokens or 8
    config = _eagle3_config(target, sizes, layers=4, mask_token_id=_mask_token(target), depths=depths)
    return ConditionalDrop(config, config.resolved_aux_layers(target), depths)


def mtp(target: ModelConfig, sizes: Sizes) -> Objective:
    """The objective of a layer for multi-token prediction."""
    return MultiTokenPrediction(MTPConfig(_layers(target, sizes, 1)), sizes.num_draft_tokens or 3)


def mlp(target: ModelConfig, sizes: Sizes) -> Objective:
    """The objective of an MLP speculator."""
    V, D = target.vocab_size, target.hidden_size
    width = D if sizes.inner_size is None else sizes.inner_size
    return EachStage(MLPConfig(V, D, width, sizes.num_draft_tokens or 4, tied=sizes.tie, scale_input=True))


def medusa(target: ModelConfig, sizes: Sizes) -> Objective:
    """The objective of Medusa heads."""
    heads = sizes.num_draft_tokens or 3
    return EachMedusaHead(MedusaConfig(target.vocab_size, target.hidden_size, heads, own_head=not sizes.borrow_head))


def dspark(target: ModelConfig, sizes: Sizes) -> Objective:
    """The objective of a DSpark head, whose anchor drafts."""
    kind = "vanilla" if sizes.markov is None else sizes.markov
    require(kind in MARKOVS, "markov", kind, f"one of {', '.join(MARKOVS)}")
    rank = 256 if sizes.markov_rank is None else sizes.markov_rank
    more = {"markov": kind, "markov_rank": rank, "confidence": "markov"}
    config = _block_config(target, sizes, block_size=sizes.num_draft_tokens or 7, anchor_first=True, **more)
    return _filled_blocks(config, sizes, cross_entropy=0.1, distance=0.9, confidence=1.0)


def dflash(target: ModelConfig, sizes: Sizes) -> Objective:
    """The objective of a DFlash head, whose anchor does not draft.

    That is z-lab's layout. In DeepSpec's the anchor drafts, which saves a slot. But only the class that its config.json
    names tells such a DFlash head from a DSpark head, and engines that overlook it serve every draft one token late."""
    config = _block_config(target, sizes, block_size=(sizes.num_draft_tokens or 7) + 1, anchor_first=False)
    return _filled_blocks(config, sizes, cross_entropy=1.0, distance=0.0, confidence=0.0)


def _filled_blocks(
    config: BlockConfig, sizes: Sizes, cross_entropy: float, distance: float, confidence: float
) -> FilledBlocks:
    """The objective of a block drafter, with the loss and the anchors that were chosen.

    Args:
      config: the draft head.
      sizes: what was chosen.
      cross_entropy, distance: the weights that the method's authors have, which the loss ``soft`` replaces.
      confidence: the weight of what a confidence head says, which is the same for all losses.
    """
    loss = "published" if sizes.loss is None else sizes.loss
    require(loss in LOSSES, "loss", loss, f"one of {', '.join(LOSSES)}")
    spacing = 8 if sizes.anchor_spacing is None else sizes.anchor_spacing
    require(is_int(spacing) and spacing >= 1, "anchor_spacing", spacing, "an integer of at least 1")
    if loss == "soft":
        return FilledBlocks(config, 0.0, 0.0, confidence, soft=1.0, spacing=spacing)
    return FilledBlocks(config, cross_entropy, distance, confidence, spacing=spacing)


def _block_config(target: ModelConfig, sizes: Sizes, *, block_size: int, anchor_first: bool, **more) -> BlockConfig:
    """The config of a block drafter, whose layers are those of Qwen3 for every target."""
    layers = dataclasses.replace(_layers(target, sizes, 5), architecture="Qwen3ForCausalLM", qk_norm=True)
    V, Vd = target.vocab_size, sizes.draft_vocab_size
    return BlockConfig(
        layers=layers,
        draft_vocab_size=V if Vd is None else Vd,
        target_hidden_size=target.hidden_size,
        aux_layers=_aux_layers(target, sizes, _spread_layers(target.num_layers)),
        block_size=block_size,
        mask_token_id=_mask_token(target),
        anchor_first=anchor_first,
        causal=(False,) * layers.num_layers,
        own_head=Vd not in (None, V),
        **more,
    )


def _spread_layers(layers: int) -> tuple[int, ...]:
    """Five layers from 2 to L - 2, as published block drafters read, fewer if L is small: 2, 10, 18, 26 and 34 of 36."""
    if layers < 5:
        return default_aux_layers(layers)
    return tuple(sorted({round(2 + i * (layers - 4) / 4) for i in range(5)}))


def _mask_token(target: ModelConfig) -> int:
    """The token that mask slots read. It has to be one that the target knows, and in a text it should be rare."""
    return next(iter(target.eos_token_ids), 0)


def _aux_layers(target: ModelConfig, sizes: Sizes, default: tuple[int, ...]) -> tuple[int, ...]:
    aux_layers = default if sizes.aux_layers is None else tuple(sizes.aux_layers)
    furthest, L = max(aux_layers, default=0), target.num_layers
    require(furthest <= L, "aux_layers", aux_layers, f"at most {L}, the target's layers")
    return aux_layers


def _eagle3_config(
    target: ModelConfig, sizes: Sizes, *, layers: int, mask_token_id: int | None, depths: int
) -> Eagle3Config:
    """The config of an EAGLE-3 or P-EAGLE head with ``layers`` layers, unless ``sizes`` says otherwise."""
    aux_layers = _aux_layers(target, sizes, default_aux_layers(target.num_layers))
    V, Vd = target.vocab_size, sizes.draft_vocab_size
    return Eagle3Config(
        layers=_layers(target, sizes, layers),
        draft_vocab_size=min(V, 32_000) if Vd is None else Vd,
        target_hidden_size=target.hidden_size,
        num_aux_layers=len(aux_layers),
        aux_layers=aux_layers,
        mask_token_id=mask_token_id,
        trained_drafts=depths,
    )


def _layers(target: ModelConfig, sizes: Sizes, layers: int) -> ModelConfig:
    """The config of Llama layers of the target's width, with full attention."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size if sizes.intermediate_size is None else sizes.intermediate_size,
        num_layers=layers if sizes.layers is None else sizes.layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position=target.max_position,
        rms_norm_eps=target.rms_norm_eps,
        rope=_rope(target.rope),
    )


def _rope(rope: Rope | None) -> Rope:
    """The target's rotary embedding, or the plain one of its base where layouts of draft heads cannot state it."""
    if rope is None:
        return Rope()
    plain = rope.kind != "longrope" and rope.fraction == 1 and not rope.query_growth
    return rope if plain else Rope(theta=rope.theta)


def _eagle_layer(target: ModelConfig, sizes: Sizes) -> ModelConfig:
    """The config of an EAGLE head's layer. EAGLE's public layout names no head dimension, so H is D / N here."""
    D, N = target.hidden_size, target.num_heads
    if D % (2 * N):
        raise ValueError(f"an eagle head has heads of D / N = {D} / {N} numbers: expected an even number; use eagle3")
    return dataclasses.replace(_layers(target, sizes, 1), head_dim=D // N)


def initial_params(objective: Objective, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
    """The weights that training starts from, float32, and the parameters that are not trained.

    Args:
      objective: has the config of the draft head, and says which weights do not start at random.
      target: the target's module.
      tokens: the training data, whose most frequent tokens make up a draft vocabulary.
      key: the key of the random weights.
    """
    key, key_of_start = jax.random.split(key)
    params = jax.jit(lambda key: flat_params(init(objective.config, nnx.Rngs(key))))(key)
    start, constants = objective.start(params, target, tokens, key_of_start)
    # These are copies, because the first step donates its weights, and the target still needs its own.
    trained = {name: jnp.array(array, jnp.float32, copy=True) for name, array in start.items()}
    return {name: array for name, array in (params | trained).items() if name not in constants}, constants
