"""Reads which layers of a Hugging Face config have an attention window, and how wide it is."""

from collections.abc import Callable

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.rope import rotated_layers

Windows = tuple[int | None, ...]
Slides = Callable[[Fields, int], tuple[bool, ...]]  # (config.json, layers) -> whether each layer has a window


def never(fields: Fields, layers: int) -> tuple[bool, ...]:
    """No layer has a window."""
    del fields
    return (False,) * layers


def always(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Every layer has the window, if config.json has one."""
    del fields
    return (True,) * layers


def from_a_layer_on(fields: Fields, layers: int) -> tuple[bool, ...]:
    """The layers from ``max_window_layers`` on have it."""
    first = fields.integer("max_window_layers", 28, low=0)
    return tuple(layer >= first for layer in range(layers))


def every_other_below_a_layer(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Every other layer has it, from the first on, up to the one before ``max_window_layers`` (Qwen2-MoE)."""
    last = fields.integer("max_window_layers", 28, low=0)
    return tuple(layer % 2 == 0 and layer < last for layer in range(layers))


def without_rotation(fields: Fields, layers: int) -> tuple[bool, ...]:
    """The layers without rotary embedding have it (SmolLM3)."""
    return tuple(not rotated for rotated in rotated_layers(fields, layers))


def all_but_every_nth(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Every n-th layer has full attention, n being ``sliding_window_pattern``, and the others the window (Gemma)."""
    n = fields.integer("sliding_window_pattern")
    return tuple((layer + 1) % n != 0 for layer in range(layers))


def listed_or_every_nth(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Those that ``layer_types`` lists, or else all but every n-th (EXAONE 4, whose pattern may also be letters)."""
    if fields.raw.get("layer_types") is not None or fields.raw.get("sliding_window") is None:
        return never(fields, layers)
    return all_but_every_nth(fields, layers)


def read_windows(fields: Fields, layers: int, slides: Slides, switch: bool, listed: bool) -> Windows:
    """The attention window of each layer, in tokens; None for full attention.

    Args:
      fields: config.json.
      layers: the number of layers.
      slides: which layers have the window, if config.json has no ``layer_types``.
      switch: whether they have it only if ``use_sliding_window`` is set.
      listed: whether ``layer_types`` may differ from what ``slides`` says.
    """
    sliding = slides(fields, layers)
    switched_off = switch and not fields.flag("use_sliding_window")
    window = fields.integer(
        "sliding_window", None, low=0 if switched_off else 1
    )  # 0 is written of one that is not used
    if not (any(sliding) or listed) or switched_off:
        window = None
    derived = tuple(window if slid else None for slid in sliding)
    if fields.raw.get("layer_types") is None:
        return derived
    windows = listed_windows(fields, window, layers)
    if not listed and windows != derived:
        raise fields.refuse("layer_types", "the same attention in every layer, as this architecture has")
    return windows


def listed_kinds(fields: Fields, layers: int, *known: str) -> list[str] | None:
    """The kind of each layer, one of two ``known``, as the key ``layer_types`` lists them; None if there is no such key."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(k, str) and k in known for k in kinds):
        raise fields.refuse("layer_types", f"{layers} entries, each {' or '.join(known)}")
    return kinds


def listed_windows(fields: Fields, window: int | None, layers: int) -> Windows:
    """The attention window of each layer, as the key ``layer_types`` lists them.

    Args:
      fields: the config; it has to have ``layer_types``.
      window: the window, in tokens, of each ``sliding_attention`` layer; None if config.json has none.
      layers: the number of layers.

    Returns:
      ``window`` for a ``sliding_attention`` layer, None for a ``full_attention`` layer.
    """
    known = {"full_attention": None, "sliding_attention": window}
    kinds = listed_kinds(fields, layers, *known) or []
    if window is None and "sliding_attention" in kinds:
        raise fields.refuse("layer_types", "a sliding_window for its sliding_attention layers, and its use switched on")
    return tuple(known[kind] for kind in kinds)
