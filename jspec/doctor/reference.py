"""The reference of a comparison: what transformers computes from a checkpoint on the CPU, without any code from it."""

import dataclasses
import importlib.util
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from jspec.checkpoints.converted.manifest import is_converted
from jspec.checkpoints.files.json_files import reason_of
from jspec.checkpoints.files.refusal import Refusal

DTYPES = ("float32", "bfloat16")
MAX_REASON = 300  # characters of an error of transformers
_PACKAGES = ("torch", "transformers")


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a model makes of a text in one pass over it.

    Attributes:
      logits: float32 ``[T, V]``, of the token after each of the text's.
      hidden: float32 ``[T, D]`` each: the embeddings, the residual stream after every layer but the last, and what the
        output head reads. () where they are not kept.
    """

    logits: np.ndarray
    hidden: tuple[np.ndarray, ...] = ()


def require_packages(option: str = "--reference"):
    """Check that torch and transformers are installed, with which ``option`` compares.

    Raises:
      ValueError: one of them is not.
    """
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(
            f"{option} compares with transformers, and {' and '.join(absent)} is not installed: "
            "pip install 'jspec[parity]', or torch by itself"
        )


class Reference:
    """A language model of transformers.

    Args:
      folder: the original checkpoint, in Hugging Face's layout; untrusted.
      dtype: that of weights and computation, one of ``DTYPES``.

    Raises:
      Refusal: transformers has no class for the checkpoint, or cannot load it.
    """

    def __init__(self, folder: str | os.PathLike, dtype: str):
        import torch

        if is_converted(folder):
            raise Refusal(
                f"{folder}: was written by jspec-convert, which transformers cannot read; give the original folder"
            )
        self._model = _load(folder, getattr(torch, dtype))
        self._model.eval()

    def write(self, prompt: Sequence[int], max_tokens: int, end_tokens: Collection[int]) -> list[int]:
        """The greedy completion of a prompt, without the token that ends it; generation_config.json takes no part in it."""
        import torch
        from transformers import GenerationConfig

        ends = sorted(end_tokens)
        settings = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, pad_token_id=(*ends, 0)[0])
        settings.eos_token_id = ends or None
        self._model.generation_config = settings
        inputs = torch.tensor([list(prompt)])
        with torch.no_grad():
            tokens = self._model.generate(inputs, attention_mask=torch.ones_like(inputs))[0, len(prompt) :].tolist()
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens

    def read(self, texts: Sequence[Sequence[int] | np.ndarray]) -> Iterator[Reading]:
        """What the model makes of each text; the hidden states are kept of the first."""
        import torch

        for index, text in enumerate(texts):
            with torch.no_grad():
                output = self._model(torch.tensor([list(text)]), use_cache=False, output_hidden_states=index == 0)
            hidden = getattr(output, "hidden_states", None) or ()
            yield Reading(_array(output.logits), tuple(_array(states) for states in hidden))


def _load(folder: str | os.PathLike, dtype: Any) -> Any:
    import transformers

    options = {"dtype": dtype, "attn_implementation": "eager", "use_safetensors": True}
    options |= {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model_class = transformers.AutoModelForCausalLM
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:  # such as a wrapper of text and pictures
            named = [getattr(transformers, name, None) for name in config.architectures or ()]
            model_class = next(filter(None, named), None)
    except Exception as error:  # transformers raises many kinds
        raise _refusal(folder, error) from None
    if model_class is None:
        raise Refusal(
            f"{folder}: transformers {transformers.__version__} has no class for {', '.join(config.architectures or ['it'])}"
            f" (model_type {config.model_type!r}), and code of the checkpoint is never run; try a later transformers"
        )
    try:
        loaded: Any = model_class.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:
        raise _refusal(folder, error) from None
    model, info = loaded
    random = sorted({*map(str, info["missing_keys"]), *(str(key) for key, *_ in info["mismatched_keys"])})
    if random:  # transformers only warns that these are not the checkpoint's
        raise Refusal(
            f"{folder}: transformers finds no tensor of the right shape for {random[0]}; fetch the folder again"
        )
    return model


def _refusal(folder: str | os.PathLike, error: Exception) -> Refusal:
    import transformers

    reason = "".join(letter if letter.isprintable() else "?" for letter in reason_of(error)[:MAX_REASON])
    library = f"transformers {transformers.__version__}"
    return Refusal(f"{folder}: {library} cannot load it ({reason}); correct that, or try another transformers")


def _array(tensor: Any) -> np.ndarray:
    """The array of one text in a batch."""
    return tensor[0].float().numpy()
