"""EAGLE-3 heads (Li et al., 2025) and P-EAGLE heads (2026): tensors ``midlayer.*`` or ``layers.0.*``, ``fc``, ``norm``.

The tensors are the same in every public layout; where their config.json keeps its settings is not. ``read`` is for the
native layouts (the authors', SpecForge's, NVIDIA Model Optimizer's, NeMo Automodel's);
``jspec.checkpoints.heads.speculators`` reads its own."""

import dataclasses
import os
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.heads.format import HeadFormat, architectures
from jspec.checkpoints.heads.layers import OUTPUT_HEAD, by_presence, read_layers
from jspec.checkpoints.heads.options import HeadOptions
from jspec.checkpoints.heads.vocabulary import D2T, T2D, draft_ids, offsets, require_identity
from jspec.checkpoints.layout import Layout, reshaped
from jspec.checkpoints.names import Placement, renamed, tensor_table
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor
from jspec.heads import EMBEDDING, Eagle3Config

IDS = "eagle_aux_hidden_state_layer_ids"
MASK = "mask_hidden"
MASK_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
NORM, NORM_KEY, LAST_NORM_KEY = "norm.weight", "norm_output", "use_last_layernorm"
OLD_AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
NEMO = "LlamaEagle3DraftModel"  # the class that NeMo Automodel alone writes into ``architectures``

# Settings that change what a head computes, with the one value that is supported.
_FIXED: tuple[tuple[str, float | bool], ...] = (
    ("logit_scale", 1),
    ("use_input_layernorm_in_first_layer", True),
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

    def mask_token(self, vocab_size: int, said: int | None) -> int:
        """The token of mask slots, under the first of its names that vLLM looks for, else the one that was ``said``."""
        top = self.places[-1]
        for key in MASK_KEYS:
            *outer, name = key.split(".")
            place = top.nested(outer[0]) if outer else self.of(name)
            if place is not None and place.raw.get(name) is not None:
                return _token(place, name, vocab_size, said)
        if said is not None:
            return said
        raise Refusal(
            f"{top.where}: none of {', '.join(MASK_KEYS)} names the token of mask slots, and {MASK!r} is there; say which "
            "token the head was trained with: --mask-token-id (mask_token_id=)"
        )


class FinalNorm(NamedTuple):
    """What becomes of the last layer's output: whether the output head reads its norm, and whether that norm is fed
    back."""

    before_head: bool
    recycled: bool


def read(fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The layout of a folder in a native layout."""
    inner = fields.nested("eagle_config")
    settings = Settings((inner, fields) if inner else (fields,))
    aux_layers = native_aux_layers(settings.of(IDS), options.aux_convention)
    norm_output = _norm_convention(fields, settings.of(NORM_KEY), options.norm_output, tensors)
    norm = native_norm(settings, tensors, norm_output)
    parallel = "peagle" in str(fields.raw.get("architectures")).lower() or fields.flag("parallel_drafting")
    if "Qwen3" in str(fields.raw.get("architectures")) and not any("q_norm" in name for name in tensors):
        raise fields.refuse("architectures", "one without query and key norms, because the files hold none")
    layout = build(_layers(fields, tensors), settings, tensors, aux_layers, norm, parallel, options.mask_token_id)
    return dataclasses.replace(
        layout, aux_convention=options.aux_convention if aux_layers else None, norm_output=norm_output
    )


def _layers(fields: Fields, tensors: Iterable[str]) -> Fields:
    """The config of the layers. NeMo Automodel copies the target's, of which it builds one layer, or as many as P-EAGLE
    has, without windows."""
    found = [int(match[1]) for match in map(re.compile(r"layers\.(\d{1,4})\.").match, tensors) if match]
    count = max(found, default=0) + 1
    if NEMO in str(fields.raw.get("architectures")):
        copied = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
        own = {key: value for key, value in fields.raw.items() if key not in copied}
        return dataclasses.replace(fields, raw={**own, "num_hidden_layers": count})
    if fields.integer("num_hidden_layers") > count:
        raise fields.refuse("num_hidden_layers", f"{count}, as many layers as the files hold tensors of")
    return fields


def _norm_convention(fields: Fields, place: Fields, said: str | None, tensors: Iterable[str]) -> str | None:
    """What ``norm_output`` means here, one of ``NORM_OUTPUTS``; None if config.json does not have it."""
    value = place.raw.get(NORM_KEY)
    if value is None:
        return None
    if NEMO in str(fields.raw.get("architectures")):
        if said == "before_head":
            raise Refusal(
                f"{place.where}: norm_output={said!r}: the heads of NeMo Automodel, {NEMO}, mean that the normed output is "
                "fed back; expected 'recycled' or nothing"
            )
        return "recycled"
    if said is None and value and MASK in tensors:
        return "recycled"  # of a head that feeds nothing back, both meanings are the same
    if said is None:
        head = "reads the normed output" if value else "reads the output without a norm"
        raise Refusal(
            f"{place.where}: {place.prefix}{NORM_KEY}={value!r} can mean that the normed output is{'' if value else ' not'} "
            f"fed back, as vLLM, SGLang and SpecForge since September 2026 read it, or that the output head {head} and "
            "what is fed back is never normed, as SpecForge read it before; say which: --norm-output recycled or "
            "before_head (norm_output=)"
        )
    return said


def native_norm(settings: Settings, tensors: Iterable[str], convention: str | None) -> FinalNorm:
    """The final norm by ``norm_output``, of which ``convention`` says what it means, and ``use_last_layernorm``."""
    value = settings.of(NORM_KEY).flag(NORM_KEY)
    norm = FinalNorm(convention != "before_head" or value, convention == "recycled" and value)
    last = settings.of(LAST_NORM_KEY)
    if last.flag(LAST_NORM_KEY, True):
        return norm
    if NORM in tensors:
        raise last.refuse(LAST_NORM_KEY, f"true, because tensor {NORM!r} is there")
    return norm._replace(before_head=False)


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
    fields: Fields,
    settings: Settings,
    tensors: dict[str, Tensor],
    aux_layers: tuple[int, ...] | None,
    norm: FinalNorm,
    parallel: bool,
    mask_token_id: int | None,
) -> Layout:
    """The layout of an EAGLE-3 or P-EAGLE head.

    Args:
      fields: the config of its layers.
      settings: everything else in config.json.
      tensors: what the files hold.
      aux_layers: the streams that config.json lists, if it does.
      norm: what becomes of the last layer's output.
      parallel: whether config.json says that it drafts through mask slots.
      mask_token_id: the token of mask slots, if config.json does not name it.
    """
    _require_supported(fields, settings, tensors)
    first = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    layers = read_layers(fields, tensors, first, bias_key="attention_bias")
    target_size = settings.of("target_hidden_size").integer("target_hidden_size", layers.hidden_size)
    num_aux_layers = _num_aux_layers(settings, tensors, target_size, aux_layers)
    old = f"{OLD_AUX_NORMS[0]}.weight" in tensors
    norm_key, aux_norm = ("use_aux_norm", OLD_AUX_NORMS[0]) if old else ("fc_norm", "fc_norm.0")
    mask = MASK in tensors
    if mask_token_id is not None and not mask:
        raise Refusal(f"{fields.where}: mask_token_id={mask_token_id!r} is for P-EAGLE heads, and this is none")
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
        norm_output=norm.recycled,
        norm_before_head=norm.before_head,
        fuse_bias=_fuse_bias(settings, tensors),
        own_embedding=EMBEDDING in tensors,
        own_head=OUTPUT_HEAD in tensors,
        mask_token_id=settings.mask_token(layers.vocab_size, mask_token_id) if mask else None,
    )
    label = "P-EAGLE head" if mask else "EAGLE-3 head"
    return Layout(
        config,
        label,
        table(config, first, old),
        _converted(os.path.dirname(fields.where), config, tensors),
        left_out=frozenset((D2T, T2D, NORM)),
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


def _fuse_bias(settings: Settings, tensors: Iterable[str]) -> bool:
    """Whether ``fc`` has a bias: the tensor decides. ``bias`` may be left over from an EAGLE config, where it means its
    own ``fc``; the authors' EAGLE-3 class does not look at it."""
    place, present = settings.of("bias"), "fc.bias" in tensors
    if present and not place.flag("bias", True):
        raise place.refuse("bias", "true, because tensor 'fc.bias' is there")
    return present


def _token(place: Fields, name: str, vocab_size: int, said: int | None) -> int:
    """A token id, which some configs write as a string of digits."""
    text = place.raw.get(name)
    if isinstance(text, str) and re.fullmatch(r"[0-9]{1,9}", text):
        place = dataclasses.replace(place, raw={**place.raw, name: int(text)})
    token = place.integer(name, low=0, high=vocab_size - 1)
    if said not in (None, token):
        raise Refusal(f"{place.where}: mask_token_id={said!r}, but {place.prefix}{name} says {token}; leave it out")
    return token


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
    read=lambda _, fields, tensors, options: read(fields, tensors, options),
    lists_layers=True,
)
