"""From a target and a few sizes to a head: its config, how it is trained, and where its weights start."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec._arguments import is_int, require
from jspec.config import ModelConfig
from jspec.heads import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig, MLPConfig, default_aux_layers
from jspec.models import flat_params, init
from jspec.models.quantized import wide
from jspec.train.objectives import ConditionalDrop, FeatureRegression, Heads, Objective, Stages, TrainingTimeTest


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What can be chosen about a head; None takes the target's, or what is usual for the method.

    Attributes:
      num_draft_tokens: places ahead that it learns: slots in a row (eagle3, 7), drafts of a pass (parallel, 8), stages
        (mlp, 4) or heads (medusa, 3).
      layers: decoder layers (eagle3, 1; parallel, 4).
      intermediate_size: their MLP width.
      draft_vocab_size: Vd, the tokens that it knows, the most frequent of the data (at most 32,000).
      aux_layers: the target's residual streams that it reads; k is the stream after k layers.
      inner_size: width of an MLP speculator's state (the target's).
      tie: whether the stages of an MLP speculator share their weights.
      borrow_head: Medusa heads without output heads of their own.
    """

    num_draft_tokens: int | None = None
    layers: int | None = None
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    aux_layers: tuple[int, ...] | None = None
    inner_size: int | None = None
    tie: bool = False
    borrow_head: bool = False


TAKES = {
    "eagle": ("intermediate_size",),
    "eagle3": ("num_draft_tokens", "layers", "intermediate_size", "draft_vocab_size", "aux_layers"),
    "parallel": ("num_draft_tokens", "layers", "intermediate_size", "draft_vocab_size", "aux_layers"),
    "mlp": ("num_draft_tokens", "inner_size", "tie"),
    "medusa": ("num_draft_tokens", "borrow_head"),
}


def make_objective(method: str, target: ModelConfig, sizes: Sizes) -> Objective:
    """A head for ``target`` and how it is trained.

    Raises:
      ValueError: a size that is out of range, or that the method does not have.
    """
    require(method in TAKES, "method", method, f"one of {', '.join(TAKES)}")
    for field in dataclasses.fields(Sizes):
        value = getattr(sizes, field.name)
        if value not in (None, False) and field.name not in TAKES[method]:
            raise ValueError(f"{field.name}={value!r}: expected nothing, a head of method {method!r} has no such size")
    K, V, D = sizes.num_draft_tokens, target.vocab_size, target.hidden_size
    require(K is None or (is_int(K) and K >= 1), "num_draft_tokens", K, "an integer of at least 1")
    if method == "eagle":
        return FeatureRegression(EagleConfig(_eagle_layer(target, sizes)))
    if method == "mlp":
        width = D if sizes.inner_size is None else sizes.inner_size
        return Stages(MLPConfig(V, D, width, K or 4, tied=sizes.tie, scale_input=True))
    if method == "medusa":
        return Heads(MedusaConfig(V, D, K or 3, own_head=not sizes.borrow_head))
    aux_layers = _aux_layers(target) if sizes.aux_layers is None else tuple(sizes.aux_layers)
    furthest = max(aux_layers, default=0)
    require(
        furthest <= target.num_layers, "aux_layers", aux_layers, f"at most {target.num_layers}, the target's layers"
    )
    parallel = method == "parallel"
    depths = K or (8 if parallel else 7)
    config = Eagle3Config(
        layers=_layers(target, sizes, 4 if parallel else 1),
        draft_vocab_size=min(V, 32_000) if sizes.draft_vocab_size is None else sizes.draft_vocab_size,
        target_hidden_size=D,
        num_aux_layers=len(aux_layers),
        aux_layers=aux_layers,
        # Mask slots are told apart by their feature, so any token that the target knows will do.
        mask_token_id=next(iter(target.eos_token_ids), 0) if parallel else None,
        trained_drafts=depths,
    )
    return (ConditionalDrop if parallel else TrainingTimeTest)(config, aux_layers, depths)


def _layers(target: ModelConfig, sizes: Sizes, layers: int) -> ModelConfig:
    """Plain Llama layers of the target's width, with full attention."""
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
        rope=target.rope,
    )


def _eagle_layer(target: ModelConfig, sizes: Sizes) -> ModelConfig:
    """EAGLE's public layout has no head dimension of its own: it is D / N."""
    D, N = target.hidden_size, target.num_heads
    if D % (2 * N):
        raise ValueError(f"an eagle head has heads of D / N = {D} / {N} numbers: expected an even number; use eagle3")
    return dataclasses.replace(_layers(target, sizes, 1), head_dim=D // N)


def _aux_layers(target: ModelConfig) -> tuple[int, ...]:
    """EAGLE-3's three streams; in a target too shallow for them an early, a middle and a late one."""
    L = target.num_layers
    usual = default_aux_layers(L)
    return usual if len(usual) == 3 and usual[0] > 0 else tuple(sorted({1, L // 2, L - 1}))


def frequent_tokens(tokens: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """int32 ``[V]``: the row of each of the ``count`` most frequent tokens, in the order of their ids; -1 for
    others."""
    frequency = np.bincount(tokens, minlength=vocab_size)
    chosen = np.sort(np.argsort(-frequency, kind="stable")[:count])
    rows = np.full(vocab_size, -1, np.int32)
    rows[chosen] = np.arange(count, dtype=np.int32)
    return rows


def initial_params(config: HeadConfig, target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
    """fp32 weights to start from, and the parameters that are not trained.

    Output heads and the norm before them begin as the target's; Medusa's blocks as the identity.

    Args:
      config: the head.
      target: its target's module.
      tokens: the training data, whose most frequent tokens make the draft vocabulary.
      key: of what is drawn.
    """
    key, key_of_mask = jax.random.split(key)
    params, constants = jax.jit(lambda key: flat_params(init(config, nnx.Rngs(key))))(key), {}
    output = wide(target.output_weight, target.output_scale)
    start: dict[str, jax.Array] = {}
    if isinstance(config, Eagle3Config):
        known = slice(None)
        if config.reduced:
            del params["draft_ids"]
            rows = frequent_tokens(tokens, config.layers.vocab_size, config.draft_vocab_size)
            constants["draft_ids"], known = jnp.asarray(rows), np.flatnonzero(rows >= 0)
        start = {"head.weight": output[known], "norm.weight": target.norm.weight[...]}
        if config.mask_token_id is not None:
            start["mask_hidden"] = jax.random.normal(key_of_mask, (config.feature_size,))
    elif isinstance(config, MedusaConfig):
        blocks = (name for name in params if name.endswith("0.weight"))
        start = {name: jnp.zeros_like(params[name]) for name in blocks}
        start |= {name: output for name in params if name.endswith("head.weight")}
    # Copies: the first step donates them, and the target goes on serving.
    return params | {name: jnp.array(array, jnp.float32, copy=True) for name, array in start.items()}, constants
