"""The settings of EAGLE-3 heads and block drafters in config.json: where they are, and what ``norm_output`` means.

Two keys mean different things to different tools, and a file does not say which tool wrote it:

- ``norm_output`` says either that the normed output is fed back into the draft head, or that the output head reads the
  normed output. The user says which with ``HeadOptions.norm_output``.
- ``eagle_aux_hidden_state_layer_ids`` lists the target's layers whose hidden states the draft head reads, either the
  inputs of these layers or their outputs: see ``jspec.checkpoints.layouts.aux_layers``.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.layouts.options import OpenSetting
from jspec.config.heads import NORM_OUTPUTS

MASK = "mask_hidden"
MASK_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
NORM, NORM_KEY, LAST_NORM_KEY = "norm.weight", "norm_output", "use_last_layernorm"
NEMO = "LlamaEagle3DraftModel"  # the class that NeMo Automodel alone writes into ``architectures``


@dataclasses.dataclass(frozen=True)
class Settings:
    """The JSON objects that may hold the settings of a draft head other than those of its layers.

    Attributes:
      objects: in order of precedence. NVIDIA Model Optimizer, for example, keeps some settings in the nested object
        ``eagle_config`` and the others at the top level of config.json. The last one is the top level.
    """

    objects: tuple[Fields, ...]

    @classmethod
    def of(cls, fields: Fields, nested: str | None = None) -> "Settings":
        """Those of a config.json, at the top or, before that, in the object ``nested``."""
        inner = None if nested is None else fields.nested(nested)
        return cls((inner, fields) if inner else (fields,))

    def object_with(self, key: str) -> Fields:
        """The first object that has ``key``; the top level if none has it."""
        return next((holder for holder in self.objects if holder.raw.get(key) is not None), self.objects[-1])

    def integer(self, key: str, *absent: int | None, low: int = 1) -> Any:
        """As ``Fields.integer`` of the object with ``key``; likewise the next three."""
        return self.object_with(key).integer(key, *absent, low=low)

    def text(self, key: str, *absent: str | None) -> Any:
        return self.object_with(key).text(key, *absent)

    def only(self, key: str, value: bool | float | str, why: str):
        self.object_with(key).only(key, value, why)

    def refuse(self, key: str, expected: str) -> Refusal:
        return self.object_with(key).refuse(key, expected)

    def flag(self, *keys: str) -> bool | None:
        """The boolean that config.json has under any of ``keys``, in any object; None if it has none of them.

        Raises:
          Refusal: one of them is no boolean, or two of them differ.
        """
        holders = [(holder, key) for key in keys for holder in self.objects if holder.raw.get(key) is not None]
        said = [(f"{holder.prefix}{key}", holder.flag(key)) for holder, key in holders]
        for name, value in said[1:]:
            if value != said[0][1]:
                raise Refusal(
                    f"{self.objects[-1].where}: {said[0][0]}={said[0][1]} and {name}={value} contradict each other, because "
                    "they say the same thing; leave out the one that is wrong"
                )
        return said[0][1] if said else None

    def require_fixed(self, fixed: Iterable[tuple[str, float | bool | None]]):
        """Raise a ``Refusal`` unless each key of ``fixed`` has the value beside it, or null, in every object that has it."""
        for holder, (key, only) in itertools.product(self.objects, fixed):
            value = holder.raw.get(key)
            if value is not None and value != only:
                raise holder.refuse(key, "null" if only is None else f"{only!r}, the one value that is supported")

    def mask_token(self, vocab_size: int, given: int | None) -> int:
        """The token id of the mask slots: that of the first of ``MASK_KEYS`` in config.json, else ``given``.

        Args:
          vocab_size: V; the token id has to be below it.
          given: the option ``mask_token_id`` of the user, None if it was not given.

        Raises:
          Refusal: neither says which token it is, or both do and they differ.
        """
        top = self.objects[-1]
        for key in MASK_KEYS:  # in the order in which vLLM looks for them
            *outer, name = key.split(".")
            holder = top.nested(outer[0]) if outer else self.object_with(name)
            if holder is not None and holder.raw.get(name) is not None:
                return _token(holder, name, vocab_size, given)
        if given is not None:
            return given
        raise Refusal(
            f"{top.where}: none of {', '.join(MASK_KEYS)} names the token of mask slots, and {MASK!r} is there; say which "
            "token the draft head was trained with: --mask-token-id (mask_token_id=)"
        )


class FinalNorm(NamedTuple):
    """Which readers of the last layer's output read it normed.

    Attributes:
      before_head: whether the output head reads the normed output.
      recycled: whether the normed output is what is fed back into the draft head at the next draft position.
    """

    before_head: bool
    recycled: bool


def norm_meaning(fields: Fields, holder: Fields, given: str | None, tensors: Iterable[str]) -> str | None:
    """What the key ``norm_output`` means here: ``recycled`` or ``before_head``; None if config.json lacks the key.

    Args:
      fields: config.json.
      holder: the object in it that has the key.
      given: the option ``norm_output`` of the user, None if it was not given.
      tensors: the names of the tensors.

    Raises:
      Refusal: the key can mean either and the user did not say which, or the user contradicts NeMo Automodel's meaning.
    """
    value = holder.raw.get(NORM_KEY)
    if value is None:
        return None
    if NEMO in str(fields.raw.get("architectures")):
        if given == "before_head":
            raise Refusal(
                f"{holder.where}: norm_output={given!r}: the draft heads of NeMo Automodel, {NEMO}, mean that the normed "
                "output is fed back; expected 'recycled' or nothing"
            )
        return "recycled"
    if given is None and value and MASK in tensors:
        return "recycled"  # A P-EAGLE head feeds nothing back, so both meanings give the same computation.
    if given is None:
        reads = "reads the normed output" if value else "reads the output without a norm"
        raise OpenSetting(
            f"{holder.where}: {holder.prefix}{NORM_KEY}={value!r} can mean that the normed output is"
            f"{'' if value else ' not'} fed back, as vLLM, SGLang and SpecForge since September 2026 read it, or that the "
            f"output head {reads} and what is fed back is never normed, as SpecForge read it before; say which: "
            "--norm-output recycled or before_head (norm_output=)",
            "norm_output",
            NORM_OUTPUTS,
        )
    return given


def final_norm(settings: Settings, tensors: Iterable[str], meaning: str | None) -> FinalNorm:
    """The final norm as ``norm_output`` and ``use_last_layernorm`` set it.

    Args:
      settings: those of config.json.
      tensors: the names of the tensors.
      meaning: what ``norm_output`` means, as ``norm_meaning`` returns it.

    Raises:
      Refusal: ``use_last_layernorm`` is false although the files hold the norm's weight.
    """
    value = settings.object_with(NORM_KEY).flag(NORM_KEY)
    norm = FinalNorm(before_head=meaning != "before_head" or value, recycled=meaning == "recycled" and value)
    last = settings.object_with(LAST_NORM_KEY)
    if last.flag(LAST_NORM_KEY, True):
        return norm
    if NORM in tensors:
        raise last.refuse(LAST_NORM_KEY, f"true, because tensor {NORM!r} is there")
    return norm._replace(before_head=False)


def _token(fields: Fields, name: str, vocab_size: int, given: int | None) -> int:
    """The token id under the key ``name``, which some configs write as a string of digits."""
    text = fields.raw.get(name)
    if isinstance(text, str) and re.fullmatch(r"[0-9]{1,9}", text):
        fields = dataclasses.replace(fields, raw={**fields.raw, name: int(text)})
    token = fields.integer(name, low=0, high=vocab_size - 1)
    if given not in (None, token):
        raise Refusal(f"{fields.where}: mask_token_id={given!r}, but {fields.prefix}{name} says {token}; leave it out")
    return token
