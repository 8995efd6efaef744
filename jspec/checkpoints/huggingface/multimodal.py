"""The text model inside a multimodal checkpoint: its config, and its tensors. Everything else is left out."""

import dataclasses
from collections.abc import Callable

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor

# transformers class of a multimodal model -> that of its text model, whose config is under ``text_config``.
TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
}

# How tensors of the text model begin in such checkpoints -> how they begin in those of the text model alone. Tensors
# that begin with none of these belong to other parts.
_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
_TOKENS = ("bos_token_id", "eos_token_id")


def is_multimodal(fields: Fields) -> bool:
    """Whether config.json names a class of ``TEXT_MODELS``."""
    return fields.raw.get("architectures") in [[name] for name in TEXT_MODELS]


def text_fields(fields: Fields) -> Fields:
    """The config of the text model; ``fields`` themselves if the checkpoint is not multimodal.

    Tokens that begin or end a text may stand outside ``text_config``, where they count.

    Raises:
      Refusal: there is no ``text_config``.
    """
    if not is_multimodal(fields):
        return fields
    text = fields.nested("text_config")
    if text is None:
        raise Refusal(f"{fields.where}: text_config is missing: expected the config of the text model")
    tokens = {key: fields.raw[key] for key in _TOKENS if fields.raw.get(key) is not None}
    architectures = [TEXT_MODELS[fields.raw["architectures"][0]]]
    return dataclasses.replace(text, raw={**text.raw, **tokens, "architectures": architectures})


def text_tensors(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], frozenset[str]]:
    """The tensors by the names that the text model alone has for them, and the names of those of other parts."""
    renamed, others = {}, []
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            others.append(name)
        renamed[name if prefix is None else _PREFIXES[prefix] + name.removeprefix(prefix)] = tensor
    return renamed, frozenset(others)


def module_names(fields: Fields) -> Callable[[str], tuple[str, ...]]:
    """A function: name of a module in the text model alone -> the names that the checkpoint may have for it."""

    def names(name: str) -> tuple[str, ...]:
        outer = (prefix + name.removeprefix(own) for prefix, own in _PREFIXES.items() if name.startswith(own))
        return (name, *outer)

    return names if is_multimodal(fields) else lambda name: (name,)
