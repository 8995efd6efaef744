"""Which auxiliary hidden states of its target a draft head reads, as its config.json lists them.

The number k stands for the residual stream after k layers of the target; 0 is the embedding. Lists have different names, and
what an id i in them means goes by the name:

| key | heads | id i means |
|---|---|---|
| ``eagle_aux_hidden_state_layer_ids`` | EAGLE-3 | the input of layer i or its output, as ``aux_convention`` says |
| the same, beside ``use_aux_hidden_state`` in ``eagle_config`` | EAGLE-3 | the output of layer i |
| ``target_layer_ids`` | DeepSpec's EAGLE-3, block drafters | the output of layer i |
| ``aux_hidden_state_layer_ids`` | block drafters of the speculators package | the input of layer i |

The output of layer i is ``hidden_states[i + 1]`` of transformers, and the input of layer i + 1. A block drafter may read the
embedding, which is id -1 in ``target_layer_ids``. DeepSpec's EAGLE-3 heads never do."""

from typing import Any

from jspec._validation import is_int
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.layouts.eagle3_settings import Settings
from jspec.checkpoints.layouts.options import OpenSetting
from jspec.config.heads import AUX_CONVENTIONS

IDS, OUTPUT_IDS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
OTHER_IDS = "layer_ids"  # vLLM alone reads it
LAYERS = "num_target_layers"


def given_aux_layers(settings: Settings, convention: str | None, least: int = 0) -> tuple[int, ...] | None:
    """The auxiliary hidden states that the draft head reads, ascending; None if config.json does not list them.

    Args:
      settings: where config.json has settings.
      convention: the option ``aux_convention`` of the user, None if it was not given.
      least: the smallest id that ``target_layer_ids`` may have.

    Raises:
      Refusal: config.json lists layer ids of unknown meaning, or lists and option contradict each other.
    """
    either, outputs = settings.object_with(IDS), settings.object_with(OUTPUT_IDS)
    others, ids = either.raw.get(IDS), outputs.raw.get(OUTPUT_IDS)
    if settings.object_with(OTHER_IDS).raw.get(OTHER_IDS) is not None:
        raise settings.refuse(OTHER_IDS, f"none; rename it {IDS}, and say with aux_convention what it means")
    if ids is None:
        return _by_convention(either, convention or said_convention(settings))
    aux_layers = listed_after(settings, OUTPUT_IDS, shift=1, least=least)
    if not others and convention == "input_of":
        raise Refusal(
            f"{outputs.where}: aux_convention={convention!r}: {outputs.prefix}{OUTPUT_IDS}={ids} means the outputs of these "
            "layers; expected 'output_of' or nothing"
        )
    known = AUX_CONVENTIONS if convention is None else (convention,)
    if others and aux_layers not in [listed_aux_layers(either, meaning) for meaning in known]:
        raise Refusal(
            f"{outputs.where}: {outputs.prefix}{OUTPUT_IDS}={ids}, the outputs of these layers, and "
            f"{either.prefix}{IDS}={others}, read as {' or '.join(known)}, name different hidden states; leave out the list "
            "that is wrong"
        )
    return aux_layers


def said_convention(settings: Settings) -> str | None:
    """``output_of`` if config.json itself says what its layer ids mean; None if it lists none, or does not say it.

    ``eagle_config`` with ``use_aux_hidden_state`` is NVIDIA Model Optimizer's, whose forward hooks collect what these layers
    return, or SpecForge's, whose code takes ``hidden_states[id + 1]``. Neither writes ``norm_before_fc`` there."""
    if settings.object_with(OUTPUT_IDS).raw.get(OUTPUT_IDS):
        return "output_of"
    holder = settings.object_with(IDS)
    trained = holder is not settings.objects[-1] and holder.raw.get("use_aux_hidden_state") is True
    return "output_of" if trained and holder.raw.get(IDS) and holder.raw.get("norm_before_fc") is None else None


def _by_convention(holder: Fields, convention: str | None) -> tuple[int, ...] | None:
    """The auxiliary hidden states, as ``listed_aux_layers`` returns them, by the convention that the user gave."""
    ids = holder.raw.get(IDS)
    if not ids:
        return None
    if convention is None:
        raise OpenSetting(
            f"{holder.where}: {holder.prefix}{IDS}={ids!r} can mean the inputs of these layers, as vLLM and speculators "
            "write it, or their outputs, as SpecForge, SGLang and NVIDIA Model Optimizer do; say which: --aux-convention "
            "input_of or output_of (aux_convention=)",
            "aux_convention",
            AUX_CONVENTIONS,
        )
    return listed_aux_layers(holder, convention)


def listed_aux_layers(holder: Fields, convention: str) -> tuple[int, ...] | None:
    """The auxiliary hidden states that ``eagle_aux_hidden_state_layer_ids`` lists, ascending, as ``fc`` joins them.

    Example: the list ``[2, 18, 33]`` gives ``(2, 18, 33)`` by the convention ``input_of`` and ``(3, 19, 34)`` by
    ``output_of``.

    Args:
      holder: the object in config.json that has the list of layer ids; without a list, None is returned.
      convention: ``input_of`` or ``output_of``, what the ids mean.
    """
    ids = holder.raw.get(IDS)
    if not ids:
        return None
    if not isinstance(ids, list) or not all(is_int(i) and i >= 0 for i in ids):
        raise holder.refuse(IDS, "a list of layer ids of at least 0")
    shift = 1 if convention == "output_of" else 0
    return tuple(sorted({i + shift for i in ids}))


def listed_after(settings: Settings, key: str, shift: int, least: int) -> tuple[int, ...]:
    """The auxiliary hidden states that a list of ascending ids names.

    Args:
      settings: where config.json has settings; its ``num_target_layers`` bounds the ids, if it is there.
      key: the key of the list.
      shift: what is added to each id.
      least: the smallest id.
    """
    holder, count = settings.object_with(key), settings.integer(LAYERS, None)
    ids: Any = holder.raw.get(key)
    if not isinstance(ids, list) or not ids or not all(is_int(i) and i >= least for i in ids):
        raise holder.refuse(key, f"a list of layer ids of at least {least}")
    if ids != sorted(set(ids)):
        raise holder.refuse(key, "different layer ids, ascending, which is the order in which 'fc.weight' reads them")
    if count is not None and ids[-1] + shift > count:
        raise holder.refuse(key, f"layer ids of at most {count - shift}, because {LAYERS}={count}")
    return tuple(i + shift for i in ids)


def aux_ids_key(settings: Settings) -> str:
    """The key under which config.json lists layer ids, for messages."""
    return IDS if settings.object_with(IDS).raw.get(IDS) else OUTPUT_IDS
