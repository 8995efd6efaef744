"""``Family``: how config.json of a transformers class is read."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.families import family_keys
from jspec.checkpoints.huggingface.families.family_keys import Choices
from jspec.checkpoints.huggingface.rope import read_ropes
from jspec.checkpoints.huggingface.windows import Slides, Windows, never


@dataclasses.dataclass(frozen=True)
class Family:
    """How config.json of a transformers class is read.

    Attributes:
      models: the models that have this class, for readers of docs/guides/models.md.
      defaults: key -> what the class takes if config.json lacks the key.
      choices: the choices of ``ModelConfig`` that the class fixes whatever config.json says.
      keys: the usual name of a key -> what the class calls it.
      slides: which layers have an attention window if config.json does not list them.
      window_switch: whether they have it only if ``use_sliding_window`` is set.
      lists_windows: whether ``layer_types`` may say otherwise.
      biases: which attention projections have biases. ``none``, ``qkv``, or ``configured``: all four if the key
        ``attention_bias`` is true.
      mlp_bias: whether the key ``mlp_bias`` says that the MLP has biases.
      ropes: reads the fields ``rope`` and ``layer_ropes``, from config.json and the window of each layer.
      has_delta_nets: whether some layers have gated delta nets, which ``layer_types`` lists; no layer has a window then.
      more: reads the choices that keys of the class's own decide.
      reads_quantization: the ``quant_method`` of a ``quantization_config`` that ``more`` reads.
      own_code: whether its checkpoints name Python code of their own (``auto_map``) that computes what the class does.
        jspec never runs it. Checkpoints of other families that ask for code are refused.
    """

    models: str
    defaults: Mapping[str, Any]
    choices: Choices = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    slides: Slides = never
    window_switch: bool = False
    lists_windows: bool = False
    biases: Literal["none", "qkv", "configured"] = "none"
    mlp_bias: bool = False
    ropes: Callable[[Fields, Windows], Choices] = read_ropes
    more: Callable[[Fields], Choices] = family_keys.nothing_more
    reads_quantization: tuple[str, ...] = ()
    own_code: bool = False
    has_delta_nets: bool = False

    def key(self, usual: str) -> str:
        """What the class calls a key."""
        return self.keys.get(usual, usual)
