"""EAGLE-3 heads (Li et al., 2025) and P-EAGLE heads (2026): tensors ``midlayer.*`` or ``layers.0.*``, ``fc``, ``norm``.

The tensors are the same in every public layout; where their config.json keeps its settings is not. ``read`` is for the
native layouts (the authors', SpecForge's, NVIDIA Model Optimizer's); ``jspec.checkpoints.heads.speculators`` reads its
own."""

import dataclasses
import os
from collections.abc import Collection

import numpy as np

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.heads.format import HeadFormat, architectures
from jspec.checkpoints.heads.layers import OUTPUT_HEAD, by_presence, read_layers
from jspec.checkpoints.heads.vocabulary import D2T, T2D, draft_ids, offsets, require_identity
from jspec.checkpoints.layout import Layout, reshaped
from jspec.checkpoints.names import Placement, renamed, tensor_table
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor
from jspec.heads import EMBEDDING, Eagle3Config

CONVENTIONS = ("input_of", "output_of")
IDS = "eagle_aux_hidden_state_layer_ids"
MASK = "mask_hidden"
MASK_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
OLD_AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")

# Settings that change what a head computes, with the one value that is supported.
_FIXED: tuple[tuple[str, float | bool], ...] = (
    ("logit_scale", 1),
    ("use_input_layernorm_in_first_layer", True),
    ("use_last_layernorm", True),
    ("use_mtp_layernorm", False),
    ("parallel_draft_step", 1),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where config.json keeps the settings of a head around its layers: the first of ``places`` that has a key
    counts."""

    places: tuple[Fields, ...]

    def of(self, key: str) -> Fields:
        """The object to read ``key`` from."""
        return next((place for place in self.places if place.raw.get(key) is not None), self.places[-1])

    def mask_token(self, vocab_size: int) -> int:
        """The token of mask slots, under the first of its names that vLLM looks for."""
        top = self.places[-1]
        for key in MASK_KEYS:
            *outer, name = key.split(".")
            place = top.nested(outer[0]) if outer else self.of(name)
            if place is not None and place.raw.get(name) is not None:
                return place.integer(name, low=0, high=vocab_size - 1)
        raise Refusal(
            f"{top.where}: none of {', '.join(MASK_KEYS)} names the token of mask slots, and {MASK!r} is there"
        )


def read(fields: Fields, tensors: dict[str, Tensor], aux_convention: str | None) -> Layout:
    """The layout of a folder in a native layout."""
    inner = fields.nested("eagle_config")
    settings = Settings((inner, fields) if inner else (fields,))
    aux_layers = native_aux_layers(settings.of(IDS), aux_convention)
    parallel = "peagle" in str(fields.raw.get("architectures")).lower() or fields.flag("parallel_drafting")
    if "Qwen3" in str(fields.raw.get("architectures")) and not any("q_norm" in name for name in tensors):
        raise fields.refuse("architectures", "one without query and key norms, because the files hold none")
    layout = build(fields, settings, tensors, aux_layers, parallel)
    return dataclasses.replace(layout, aux_convention=aux_convention if aux_layers else None)


def native_aux_layers(place: Fields, aux_convention: str | None) -> tuple[int, ...] | None:
    """The residual streams that the listed layer ids mean; None if none are listed."""
    ids = place.raw.get(IDS)
    if not ids:
        return None
    if aux_convention is None:
        raise Refusal(
            f"{place.where}: {place.prefix}{IDS}={ids!r} can mean the inputs of these layers, as vLLM and speculators "
            "write it, or their outputs, as SpecForge, SGLang and NVIDIA Model Optimizer do; say which: --aux-convention "
            "input_of or output_of (aux_convention=)"
        )
    return listed_aux_layers(place, aux_convention)


def listed_aux_layers(place: Fields, convention: str) -> tuple[int, ...] | None:
    """The residual streams (k is the stream after k layers), ascending, as every engine joins them."""
    ids = place.raw.get(IDS)
    if not ids:
        return None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise place.refuse(IDS, "a list of layer ids of at least 0")
    shift = 1 if convention == "output_of" else 0
    return tuple(sorted({i + shift for i in ids}))


def build(
    fields: Fields, settings: Settings, tensors: dict[str, Tensor], aux_layers: tuple[int, ...] | None, parallel: bool
) -> Layout:
    """The layout of an EAGLE-3 or P-EAGLE head.

    Args:
      fields: the config of its layers.
      settings: everything else in config.json.
      tensors: what the files hold.
      aux_layers: the streams that config.json lists, if it does.
      parallel: whether config.json says that it drafts through mask slots.
    """
    _require_supported(fields, settings, tensors)
    first = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    layers = read_layers(fields, tensors, first, bias_key="attention_bias")
    target_size = settings.of("target_hidden_size").integer("target_hidden_size", layers.hidden_size)
    num_aux_layers = _num_aux_layers(settings, tensors, target_size, aux_layers)
    old = f"{OLD_AUX_NORMS[0]}.weight" in tensors
    norm_key, aux_norm = ("use_aux_norm", OLD_AUX_NORMS[0]) if old else ("fc_norm", "fc_norm.0")
    mask = MASK in tensors
    if parallel and not mask:
        raise Refusal(f"{fields.where}: says that the head drafts in parallel, but tensor {MASK!r} is missing")
    config = Eagle3Config(
        layers=layers,
        draft_vocab_size=_draft_vocab_size(settings, tensors, layers.vocab_size),
        target_hidden_size=target_size,
        num_aux_layers=num_aux_layers,
        aux_layers=aux_layers if num_aux_layers else None,
        norm_before_fuse=by_presence(settings.of("norm_before_fc"), "norm_before_fc", "input_norm.weight", tensors),
        norm_each_aux=by_presence(settings.of(norm_key), norm_key, f"{aux_norm}.weight", tensors),
        norm_before_residual=settings.of("norm_before_residual").flag("norm_before_residual"),
        norm_output=settings.of("norm_output").flag("norm_output"),
        own_embedding=EMBEDDING in tensors,
        own_head=OUTPUT_HEAD in tensors,
        mask_token_id=settings.mask_token(layers.vocab_size) if mask else None,
    )
    label = "P-EAGLE head" if mask else "EAGLE-3 head"
    return Layout(
        config,
        label,
        table(config, first, old),
        _converted(os.path.dirname(fields.where), config, tensors),
        left_out=frozenset((D2T, T2D)),
    )


def table(config: Eagle3Config, first: str = "layers.0.", old_aux_norms: bool = False) -> dict[str, Placement]:
    """Tensor name -> its place.

    Args:
      config: the head.
      first: prefix of the first layer's tensors.
      old_aux_norms: the norm of each auxiliary state has the name that old versions of SGLang gave it.
    """
    norms = {f"fc_norm.{i}.": f"{name}." for i, name in enumerate(OLD_AUX_NORMS)} if old_aux_norms else {}
    return renamed(tensor_table(config), {"layers.0.": first, **norms})


def _require_supported(fields: Fields, settings: Settings, tensors: dict[str, Tensor]):
    for key, only in _FIXED:
        value = (place := settings.of(key)).raw.get(key)
        if value is not None and value != only:
            raise place.refuse(key, f"{only!r}, the one value that is supported")
    if fields.raw.get("kv_lora_rank") is not None or any("kv_a_proj" in name for name in tensors):
        raise Refusal(f"{fields.where}: the head has latent attention (MLA, kv_lora_rank), which is not supported")


def _num_aux_layers(
    settings: Settings, tensors: dict[str, Tensor], target_size: int, aux_layers: tuple[int, ...] | None
) -> int:
    """Streams that ``fc`` fuses; 0 if the head reads the target's final hidden state."""
    top, key = settings.places[-1], "use_aux_hidden_state"
    if not settings.of(key).flag(key, True):
        return 0
    if "fc.weight" not in tensors or len(tensors["fc.weight"].shape) != 2:
        raise Refusal(f"{top.where}: tensor 'fc.weight' is missing, and only {key}=false does without it")
    width = tensors["fc.weight"].shape[1]
    if not width or width % target_size:
        raise Refusal(
            f"{top.where}: tensor 'fc.weight' reads {width} numbers, expected a multiple of the target's hidden size, "
            f"{target_size}"
        )
    count = width // target_size
    if aux_layers is not None and len(aux_layers) != count:
        raise settings.of(IDS).refuse(IDS, f"{count} different layer ids, because 'fc.weight' fuses {count} streams")
    if settings.of("num_aux_hidden_states").integer("num_aux_hidden_states", count) != count:
        raise settings.of("num_aux_hidden_states").refuse("num_aux_hidden_states", f"{count}, as 'fc.weight' has")
    return count


def _draft_vocab_size(settings: Settings, tensors: dict[str, Tensor], vocab_size: int) -> int:
    key = "draft_vocab_size"
    head = tensors.get(OUTPUT_HEAD)
    rows = settings.of(key).integer(key, vocab_size) if head is None else head.shape[0]
    if settings.of(key).integer(key, rows) != rows:
        raise settings.of(key).refuse(key, f"{rows}, the rows of {OUTPUT_HEAD}")
    if rows > vocab_size:
        raise settings.of(key).refuse(key, f"at most {vocab_size}, the target's vocabulary")
    return rows


def _converted(folder: str, config: Eagle3Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with those whose form differs from their parameter's converted."""
    found, Vd, V = dict(tensors), config.draft_vocab_size, config.layers.vocab_size
    if D2T in tensors and config.reduced:
        found[D2T] = draft_ids(folder, tensors[D2T], tensors.get(T2D), Vd, V)
    elif D2T in tensors:
        require_identity(folder, tensors[D2T], Vd)
    if MASK in tensors:
        found[MASK] = reshaped(tensors[MASK], config.feature_size)
    return found


def _recognises(fields: Fields, names: Collection[str]) -> bool:
    if any(kind in architectures(fields) for kind in ("eagle3", "peagle")):
        return True
    return "layers.0.hidden_norm.weight" in names or any(name.startswith("midlayer.") for name in names)


def public_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors in the form of the parameters -> as files hold them."""
    public = dict(tensors)
    if D2T in tensors:
        public[D2T], public[T2D] = offsets(tensors[D2T])
    if MASK in tensors:
        public[MASK] = tensors[MASK].reshape(1, 1, -1)
    return public


FORMAT = HeadFormat(
    recognises=_recognises,
    read=lambda _, fields, tensors, aux_convention: read(fields, tensors, aux_convention),
    lists_layers=True,
)
