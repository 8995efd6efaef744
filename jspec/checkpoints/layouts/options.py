"""The settings of a draft head that the user gives because its checkpoint does not hold them."""

import dataclasses

from jspec._validation import is_int, is_one_of, require
from jspec.checkpoints.files.refusal import Refusal
from jspec.config.heads import AUX_CONVENTIONS, NORM_OUTPUTS, MTPConfig


class OpenSetting(Refusal):
    """A draft head's checkpoint leaves a setting open, which the user did not give.

    Attributes:
      name: the field of ``HeadOptions``.
      values: what it may be.
    """

    def __init__(self, message: str, name: str, values: tuple[str, ...]):
        doctor = f"or let 'jspec doctor' measure it, which tries {' and '.join(values)}"
        super().__init__(f"{message}, {doctor}")
        self.name, self.values = name, values


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Settings of a draft head that checkpoints leave open; None for a setting that was not given.

    Attributes:
      aux_convention: what the layer ids in config.json mean: the inputs (``input_of``) or the outputs (``output_of``)
        of these layers. The output of layer 2 is the input of layer 3.
      norm_output: what the key ``norm_output`` of an EAGLE-3 head's config.json means: whether the normed output is fed back
        into the draft head at the next draft position (``recycled``, as vLLM, SGLang and the later SpecForge read it), or
        whether the output head reads the normed output (``before_head``, as SpecForge read it at first). The same of
        multi-token prediction layers, which no checkpoint says; without it, the normed output is fed back.
      mask_token_id: the token id of the mask slots, through which a P-EAGLE head drafts in parallel.
      mask_first: whether multi-token prediction layers read zeros in place of the embedding beside the feature of the first
        token of a text, as in vLLM; without it, they do not.
      mtp: whether the multi-token prediction layers of a language model's checkpoint are meant, and not the model.
    """

    aux_convention: str | None = None
    norm_output: str | None = None
    mask_token_id: int | None = None
    mask_first: bool | None = None
    mtp: bool = False

    def __post_init__(self):
        for name, known in (("aux_convention", AUX_CONVENTIONS), ("norm_output", NORM_OUTPUTS)):
            value = getattr(self, name)
            require(is_one_of(value, (None, *known)), name, value, f"None or one of {', '.join(known)}")
        mask = self.mask_token_id
        require(mask is None or (is_int(mask) and mask >= 0), "mask_token_id", mask, "None or a token id")
        require(is_one_of(self.mask_first, (None, True, False)), "mask_first", self.mask_first, "None, True or False")

    def of_mtp(self, config: MTPConfig) -> MTPConfig:
        """``config`` as the options say that its layers are to be read."""
        given = {
            "norm_output": None if self.norm_output is None else self.norm_output == "recycled",
            "mask_first": self.mask_first,
        }
        return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})

    def refuse_any(self, where: str, names: tuple[str, ...], kind: str):
        """Raise a ``Refusal`` if the user gave one of the options ``names`` for a checkpoint that has no use for it.

        Args:
          where: the checkpoint, for the message.
          names: the options, for example ``("mask_token_id",)``.
          kind: the checkpoints that these options are for, for example ``P-EAGLE heads``.
        """
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise Refusal(f"{where}: {name}={value!r} is for {kind}, and this is none")


NO_OPTIONS = HeadOptions()
