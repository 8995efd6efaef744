"""The text model inside a multimodal checkpoint: its config, and its tensors. Everything else is left out.

``WRAPPERS`` has one entry for each transformers class of multimodal models. Their text models are families of their own
(``jspec.checkpoints.huggingface.families``), with the same tensors behind other prefixes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.rope import KEYS, as_of_text


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """How the text model of a multimodal class is read.

    Attributes:
      models: the models that have this class, for readers of docs/guides/models.md.
      model_type: what config.json has under ``model_type``.
      texts: ``model_type`` of ``text_config`` -> the transformers class of such a text model alone. The first one is that
        of a ``text_config`` without ``model_type``.
      defaults: key -> what the class takes if ``text_config`` lacks the key, where that is not what the class of the text
        model alone takes.
      fixed: key -> the only value that the class computes, where the class of the text model alone has a choice.
      flat: whether config.json of older checkpoints has the keys of the text model beside its own, without a
        ``text_config``.
    """

    models: str
    model_type: str
    texts: Mapping[str, str]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flat: bool = False


_QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 500_000.0}
_QWEN2_5_VL = {"max_position_embeddings": 32768, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}

WRAPPERS = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "Gemma 3 4B to 27B", "gemma3", {"gemma3_text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
    ),
    "Gemma4ForConditionalGeneration": Wrapper(
        "Gemma 4 E2B, E4B, 26B-A4B, 31B", "gemma4", {"gemma4_text": "Gemma4ForCausalLM"}
    ),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        "Gemma 4 12B", "gemma4_unified", {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
    ),
    "Qwen3VLForConditionalGeneration": Wrapper(
        "Qwen3-VL 2B to 32B",
        "qwen3_vl",
        {"qwen3_vl_text": "Qwen3ForCausalLM"},
        {**_QWEN3_VL, "num_key_value_heads": 32, "head_dim": 128},
        {"use_sliding_window": False},
    ),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(
        "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B",
        "qwen3_vl_moe",
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        {
            **_QWEN3_VL,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_local_experts": 60,
        },
        {"use_sliding_window": False, "norm_topk_prob": True},
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        "Qwen2.5-VL 3B to 72B",
        "qwen2_5_vl",
        {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
        {**_QWEN2_5_VL, "max_window_layers": 80},
        flat=True,
    ),
    "Qwen3_5ForConditionalGeneration": Wrapper(
        "Qwen3.5 0.8B to 27B, Qwen3.6-27B, Qwen3.8-27B", "qwen3_5", {"qwen3_5_text": "Qwen3_5ForCausalLM"}
    ),
    "Qwen3_5MoeForConditionalGeneration": Wrapper(
        "Qwen3.5-35B-A3B to 397B-A17B, Qwen3.6-35B-A3B",
        "qwen3_5_moe",
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        "Mistral Small 3.1 and 3.2, Devstral, Ministral 3",
        "mistral3",
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    ),
}

# How tensors of the text model begin in such checkpoints -> how they begin in those of the text model alone. The first that
# a name begins with counts. A checkpoint has one of ``_EITHER``, or the names of the text model alone, ``_PLAIN``.
_PREFIXES = {"model.language_model.": "model.", "language_model.": "", "lm_head.": "lm_head."}
_EITHER = ("model.language_model.", "language_model.")
_PLAIN = ("model.embed_tokens.", "model.layers.", "model.norm.")
# How the names of tensors of other parts begin, behind ``model.`` or not.
_PARTS = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.", "embed_vision."),
    *("embed_audio.", "vision_embedder.", "audio_embedder."),
)
# Keys beside those of the text model where a config is flat.
_OF_IMAGES = ("vision_start_token_id", "vision_end_token_id", "vision_token_id", "image_token_id", "video_token_id")
_TOKENS = ("bos_token_id", "eos_token_id")
_TIED = "tie_word_embeddings"
# Keys that must not say two things, one in text_config and one beside it.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "rope_theta"),
)


def wrapper_of(fields: Fields) -> str | None:
    """The class of ``WRAPPERS`` that config.json names, by itself or by its ``model_type``; None if it names none."""
    names = fields.raw.get("architectures")
    if names in (None, []):
        kind = fields.raw.get("model_type")
        return next((name for name, wrapper in WRAPPERS.items() if wrapper.model_type == kind), None)
    return next((name for name in WRAPPERS if names == [name]), None)


def is_multimodal(fields: Fields) -> bool:
    """Whether config.json names a class of ``WRAPPERS``."""
    return wrapper_of(fields) is not None


def has_text_config(fields: Fields) -> bool:
    """Whether the keys of a multimodal checkpoint's text model are under ``text_config``."""
    return is_multimodal(fields) and bool(fields.raw.get("text_config"))


def text_fields(fields: Fields) -> Fields:
    """The config of the text model; ``fields`` themselves if the checkpoint is not multimodal.

    Tokens that begin or end a text, and whether the output head is tied to the embedding, may stand outside
    ``text_config``, where they count.

    Raises:
      Refusal: there is no ``text_config``, it is that of another class, or what stands outside contradicts it.
    """
    name = wrapper_of(fields)
    if name is None:
        return fields
    wrapper, text = WRAPPERS[name], fields.nested("text_config")
    _require_own_type(fields, name)
    if text is None:
        if not wrapper.flat or fields.raw.get("hidden_size") is None:
            raise Refusal(f"{fields.where}: text_config is missing: expected the config of the text model")
        for key in _OF_IMAGES:
            fields.raw.get(key)  # known, so nobody is warned of it
        text = dataclasses.replace(fields, raw={k: v for k, v in fields.raw.items() if k != "model_type"})
    else:
        _require_agreement(fields, text)
    architecture = _text_architecture(text, wrapper)
    for key, only in wrapper.fixed.items():
        if text.raw.get(key) not in (None, only):
            raise text.refuse(key, f"{str(only).lower()}, which is what {name} computes")
    outer = {key: fields.raw[key] for key in _TOKENS if fields.raw.get(key) is not None}
    own = {key: value for key, value in text.raw.items() if value is not None or key not in wrapper.defaults}
    own |= {key: as_of_text(rope) for key in KEYS if (rope := text.nested(key)) is not None}
    tied = {_TIED: flag} if (flag := _tied(fields, text, wrapper)) is not None else {}
    raw = {**wrapper.defaults, **own, **outer, **tied, **wrapper.fixed, "architectures": [architecture]}
    return dataclasses.replace(text, raw=raw)


def _require_own_type(fields: Fields, name: str):
    """Raise a ``Refusal`` if ``model_type`` of config.json is that of another class than ``architectures`` names."""
    kind = fields.raw.get("model_type")
    other = next((one for one, entry in WRAPPERS.items() if kind == entry.model_type and one != name), None)
    if other is not None:
        raise Refusal(
            f"{fields.where}: architectures={[name]} and model_type={kind!r}, which is of {other}, contradict each other; "
            "correct the one that is wrong"
        )


def _require_agreement(fields: Fields, text: Fields):
    """Raise a ``Refusal`` if a size outside ``text_config`` is not the one inside, which counts."""
    for key in _SIZES:
        outer, inner = fields.raw.get(key), text.raw.get(key)
        if outer is not None and inner is not None and outer != inner:
            raise Refusal(
                f"{fields.where}: {key}={outer!r} and text_config.{key}={inner!r} contradict each other; correct "
                "the one that is wrong"
            )


def _text_architecture(text: Fields, wrapper: Wrapper) -> str:
    """The transformers class of the text model alone."""
    kind = text.raw.get("model_type") or next(iter(wrapper.texts))
    if not isinstance(kind, str) or kind not in wrapper.texts:
        raise text.refuse("model_type", f"one of {', '.join(wrapper.texts)}")
    architecture, stated = wrapper.texts[kind], text.raw.get("architectures")
    families = [name for one in WRAPPERS.values() for name in one.texts.values()]
    if isinstance(stated, list) and any(name in families and name != architecture for name in stated):
        raise text.refuse("architectures", f"[{architecture!r}], as model_type={kind!r} says")
    return architecture


def _tied(fields: Fields, text: Fields, wrapper: Wrapper) -> bool | None:
    """Whether the output head is tied to the embedding; None if only the class of the text model says.

    The key outside counts. Of a class whose older configs are flat, either counts, as in transformers."""
    outer, inner = fields.flag(_TIED), text.flag(_TIED)
    if fields.raw.get(_TIED) is None or wrapper.flat:
        return outer or inner if fields.raw.get(_TIED) is not None or text.raw.get(_TIED) is not None else None
    return outer


def text_tensors(tensors: dict[str, Tensor], where: str) -> tuple[dict[str, Tensor], frozenset[str]]:
    """The tensors by the names that the text model alone has for them, and the names of those of other parts.

    Args:
      tensors: those in the files, by name.
      where: the folder, for messages.

    Raises:
      Refusal: the names of the text model's tensors begin in two ways.
    """
    renamed, others, origin, first = {}, [], {}, {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_PARTS):
            others.append(name)
            renamed[name] = tensor
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        new = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        if new in origin:
            raise _two_beginnings(where, tensor, origin[new])
        if prefix in _EITHER or name.startswith(_PLAIN):
            first.setdefault(prefix, name)
        renamed[new], origin[new] = tensor, name
    if len(first) > 1:
        one, other, *_ = first.values()
        raise _two_beginnings(where, tensors[one], other)
    return renamed, frozenset(others)


def _two_beginnings(where: str, tensor: Tensor, other: str) -> Refusal:
    return Refusal(
        f"{where}/{tensor.file}: holds tensor {tensor.name!r} besides {other!r}, whose names begin in two ways, so they "
        "belong to two models; delete those of one"
    )


def module_names(fields: Fields) -> Callable[[str], tuple[str, ...]]:
    """A function: name of a module in the text model alone -> the names that the checkpoint may have for it."""

    def names(name: str) -> tuple[str, ...]:
        outer = (prefix + name.removeprefix(own) for prefix, own in _PREFIXES.items() if name.startswith(own))
        return tuple(dict.fromkeys((name, *outer)))

    return names if is_multimodal(fields) else lambda name: (name,)
