"""Telling checkpoints apart, by their config.json and the names of their tensors."""

import dataclasses
from collections.abc import Callable, Iterable

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.folder import Folder
from jspec.checkpoints.heads import eagle, eagle3, medusa, mlp, speculators
from jspec.checkpoints.heads.options import NOTHING_SAID, HeadOptions
from jspec.checkpoints.heads.wrapping import WRAPPER, native, plain_names
from jspec.checkpoints.hf_config import decoder_config, require_size
from jspec.checkpoints.layout import Layout, decoder_layout
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor
from jspec.config import ModelConfig
from jspec.heads import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig, MLPConfig, PardConfig

# What would be taken for something else -> whether config.json or a tensor's name says so.
_UNSUPPORTED: tuple[tuple[str, Callable[[Fields, Iterable[str]], bool]], ...] = (
    ("DFlash heads", lambda fields, names: "dflash" in _architectures(fields) or "hidden_norm.weight" in names),
    (
        "EAGLE heads of NeMo Automodel, which have norms around their layer,",
        lambda fields, _: "llamaeagledraftmodel" in _architectures(fields),
    ),
    ("Hydra heads", lambda fields, names: "hydra_num_heads" in fields.raw or any("hydra" in name for name in names)),
    ("PARD-2 models", lambda fields, names: any(key.startswith("pard2") for key in fields.raw)),
)

_MODELS = ("pard", "decoder")  # kinds that are language models


def is_head(fields: Fields, names: Iterable[str]) -> bool:
    """Whether a folder holds a draft head, which needs a target. PARD does not: it is a language model."""
    wrapped = fields.raw.get("model_type") == WRAPPER
    return wrapped or _kind(fields, plain_names(fields, names).values()) not in _MODELS


def recognise(
    folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions = NOTHING_SAID
) -> Layout:
    """What a folder holds, and how its tensors become parameters.

    Args:
      folder: the folder.
      fields: its config.json.
      tensors: what its files hold, by name.
      options: what the user says of an EAGLE-3 head.

    Raises:
      Refusal: it is of no known kind, or config.json and the tensors contradict each other.
    """
    wrapped, has_code = fields.raw.get("model_type") == WRAPPER, bool(fields.raw.get("auto_map"))
    fields, tensors, left_out, notes = native(fields, tensors)
    for what, applies in _UNSUPPORTED:
        if applies(fields, tensors):
            raise Refusal(f"{folder.given}: {what} are not supported")
    kind = _kind(fields, tensors)
    if wrapped and kind in _MODELS:
        raise Refusal(
            f"{fields.where}: model_type={WRAPPER!r} says that this is an EAGLE head, but 'fc.weight' is missing"
        )
    if kind not in ("eagle3", "speculators"):
        options.refuse_any(folder.given, ("aux_convention", "norm_output"), "EAGLE-3 heads")
        options.refuse_any(folder.given, ("mask_token_id",), "P-EAGLE heads")
    try:
        layout = _read(kind, folder, fields, tensors, options)
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(f"{fields.where}: {error}") from None
    require_size(layout.config, fields.where)
    if has_code and kind not in _MODELS:
        notes = (
            *notes,
            f"config.json names code of its own (auto_map), which the weights of {layout.label} do not need",
        )
    return dataclasses.replace(layout, left_out=layout.left_out | left_out, notes=notes)


def describe(layout: Layout, verifier: str | None = None) -> str:
    """``layout`` in a line."""
    target = f", verifier {verifier}" if verifier else ""
    return f"recognised: {layout.label}, {_sizes(layout.config)}{target}"


def _kind(fields: Fields, names: Iterable[str]) -> str:
    names, architectures = set(names), _architectures(fields)
    if speculators.TYPE in fields.raw:
        return "speculators"
    if fields.raw.get("model_type") == "mlp_speculator":
        return "mlp"
    if "medusa_num_heads" in fields.raw or medusa.is_medusa(names):
        return "medusa"
    if "eagle3" in architectures or "peagle" in architectures or "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    if any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return "eagle"
    return "decoder" if fields.raw.get("pard_token") is None else "pard"


def _read(kind: str, folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    if kind == "eagle3":
        return eagle3.read(fields, tensors, options)
    if kind == "speculators":
        return speculators.read(fields, tensors, options)
    if kind in ("eagle", "mlp", "medusa"):
        return {"eagle": eagle, "mlp": mlp, "medusa": medusa}[kind].read(fields, tensors)
    model = decoder_config(folder, fields)
    layout = decoder_layout(model, tensors)
    if kind == "decoder":
        return layout
    config = PardConfig(model, fields.integer("pard_token", low=0))
    return dataclasses.replace(layout, config=config, label=f"PARD model, {layout.label}")


def _architectures(fields: Fields) -> str:
    return str(fields.raw.get("architectures")).lower()


def _sizes(config: ModelConfig | HeadConfig) -> str:
    match config:
        case Eagle3Config():
            V, Vd = config.layers.vocab_size, config.draft_vocab_size
            vocabulary = f"draft vocabulary {Vd} of {V}" if config.reduced else f"vocabulary {V}"
            streams = (
                "" if config.aux_layers is None else f", residual streams {', '.join(map(str, config.aux_layers))}"
            )
            return f"{_count(config.layers.num_layers, 'layer')}, {vocabulary}{streams}"
        case MLPConfig():
            return f"{_count(config.num_stages, 'stage')}{', tied' * config.tied}, vocabulary {config.vocab_size}"
        case MedusaConfig():
            known = "the target's output head" if config.vocab_size is None else f"vocabulary {config.vocab_size}"
            return f"{_count(config.num_heads, 'head')} of {_count(config.num_blocks, 'block')}, {known}"
        case EagleConfig() | PardConfig():
            return f"{_count(config.layers.num_layers, 'layer')}, vocabulary {config.layers.vocab_size}"
        case _:
            return f"{_count(config.num_layers, 'layer')}, vocabulary {config.vocab_size}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
