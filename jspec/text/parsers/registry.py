"""The formats by vLLM's names, and which of them a chat template asks for."""

from collections.abc import Mapping
from typing import Any, TypeVar

from jspec.text.parsers.formats.gemma4 import GEMMA4
from jspec.text.parsers.formats.glm45 import GLM45
from jspec.text.parsers.formats.json_objects import HERMES, JSON_FENCE, LLAMA3_JSON
from jspec.text.parsers.formats.mistral import MISTRAL
from jspec.text.parsers.formats.openai import OPENAI, OPENAI_GPTOSS
from jspec.text.parsers.formats.pythonic import PYTHONIC
from jspec.text.parsers.formats.sections import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from jspec.text.parsers.formats.tagged import DEEPSEEK_V32, MINIMAX_M2, QWEN3_CODER, SEED_OSS
from jspec.text.parsers.formats.thinking import GEMMA, MISTRAL_THINK, SEED, THINK, THINK_IF_OPENED
from jspec.text.parsers.tool_format import ReasoningFormat, ToolFormat

F = TypeVar("F", ToolFormat, ReasoningFormat)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    **dict.fromkeys(("hermes", "qwen3_json"), HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo"), QWEN3_CODER),
    **dict.fromkeys(("llama3_json", "llama4_json"), LLAMA3_JSON),
    **dict.fromkeys(("glm45", "glm47"), GLM45),
    "gemma4": GEMMA4,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    **dict.fromkeys(("deepseek_v32", "deepseek_v4"), DEEPSEEK_V32),
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "seed_oss": SEED_OSS,
    "mistral": MISTRAL,
    **dict.fromkeys(("pythonic", "llama4_pythonic", "olmo3"), PYTHONIC),
    "openai": OPENAI,
    "json_fence": JSON_FENCE,
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    **dict.fromkeys(("qwen3", "mimo", "deepseek_r1", "glm45", "glm47", "kimi_k2", "minimax_m2"), THINK),
    "deepseek_v3": THINK_IF_OPENED,
    "deepseek_v4": THINK,
    "seed_oss": SEED,
    "gemma4": GEMMA,
    "mistral": MISTRAL_THINK,
    "openai_gptoss": OPENAI_GPTOSS,
}
# What a template contains, of which the first that fits counts, and the names of the formats. ``None`` for reasoning
# stands for the family of ``<think>``.
SIGNS: tuple[tuple[tuple[str, ...], str, str | None], ...] = (
    (("<|start|>", "<|channel|>"), "openai", "openai_gptoss"),
    (("<|tool_call>",), "gemma4", "gemma4"),
    (("｜DSML｜tool_calls",), "deepseek_v4", "deepseek_v4"),
    (("｜DSML｜",), "deepseek_v32", "deepseek_v3"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3", "deepseek_r1"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31", "deepseek_v3"),
    (("<|tool_call_begin|>",), "kimi_k2", "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss", "seed_oss"),
    (("<arg_key>",), "glm45", "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder", "qwen3"),
    (("<tool_call>",), "hermes", "qwen3"),
    (("[TOOL_CALLS]",), "mistral", "mistral"),
    (("<function_calls>",), "olmo3", None),
    (("<|python_start|>",), "llama4_pythonic", None),
    (("[func_name1(",), "pythonic", None),
    (("<|python_tag|>",), "llama3_json", None),
    (('"parameters": dictionary of argument name',), "llama3_json", None),
)
STARTS = {"gemma4": "<|channel>", "mistral": "[THINK]", "seed_oss": "<seed:think>", "openai_gptoss": "<|channel|>"}
ARCHITECTURES = {"GptOssForCausalLM": ("openai", "openai_gptoss")}  # whose format does not depend on the template


def detect(template: str, architecture: str = "") -> tuple[str | None, str | None]:
    """The names of the formats of tool calls and of reasoning; None for one that the template has nothing of.

    Args:
      template: the text of the chat template.
      architecture: the model's class in transformers.
    """
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    fitting = (names for texts, *names in SIGNS if all(text in template for text in texts))
    tool, reasoning = next(fitting, (None, None))
    if reasoning is not None and STARTS.get(reasoning, "think>") in template:
        return tool, reasoning
    if "[THINK]" in template:
        return tool, "mistral"
    return tool, "deepseek_r1" if "</think>" in template else None


def detect_of(tokenizer: Any, template: str | None, architecture: str) -> tuple[str | None, str | None]:
    """The same for a tokenizer and the chat template in use, which is the tokenizer's own if ``template`` is None."""
    own = getattr(tokenizer, "chat_template", None) or ""
    return detect(template or (own if isinstance(own, str) else "\n".join(own.values())), architecture)


def tool_format(name: str | None) -> ToolFormat | None:
    """The format of tool calls with this name; None for None.

    Raises:
      ValueError: there is none.
    """
    return _named("tool_call_parser", name, TOOL_FORMATS)


def reasoning_format(name: str | None) -> ReasoningFormat | None:
    """The format of reasoning with this name, as of ``tool_format``."""
    return _named("reasoning_parser", name, REASONING_FORMATS)


def _named(option: str, name: str | None, formats: Mapping[str, F]) -> F | None:
    if name is not None and name not in formats:
        raise ValueError(f"{option}={name!r}: expected one of {', '.join(formats)}")
    return None if name is None else formats[name]
