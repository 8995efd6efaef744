"""What a user says of a draft head where its checkpoint does not say it."""

import dataclasses

from jspec._arguments import is_int, require
from jspec.checkpoints.refusal import Refusal
from jspec.heads import AUX_CONVENTIONS, NORM_OUTPUTS


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Settings of an EAGLE-3 or P-EAGLE head that some checkpoints leave open; None where nothing was said.

    Attributes:
      aux_convention: what the layer ids in config.json mean: ``input_of`` or ``output_of`` these layers.
      norm_output: what ``norm_output`` in config.json means: whether the normed output is fed back (``recycled``, as
        vLLM, SGLang and the later SpecForge read it), or whether the output head reads it (``before_head``, as
        SpecForge read it at first).
      mask_token_id: the token of mask slots.
    """

    aux_convention: str | None = None
    norm_output: str | None = None
    mask_token_id: int | None = None

    def __post_init__(self):
        for name, known in (("aux_convention", AUX_CONVENTIONS), ("norm_output", NORM_OUTPUTS)):
            value = getattr(self, name)
            require(value in (None, *known), name, value, f"None or one of {', '.join(known)}")
        mask = self.mask_token_id
        require(mask is None or (is_int(mask) and mask >= 0), "mask_token_id", mask, "None or a token id")

    def refuse_any(self, where: str, names: tuple[str, ...], what: str):
        """Raise a ``Refusal`` if one of ``names`` was said, of a checkpoint that is none of ``what``."""
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise Refusal(f"{where}: {name}={value!r} is for {what}, and this is none")


NOTHING_SAID = HeadOptions()
