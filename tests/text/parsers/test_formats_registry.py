"""The formats by name, and those that chat templates ask for."""

import ast
import inspect

import pytest
from transcripts_json import TRANSCRIPTS as JSON
from transcripts_other import TRANSCRIPTS as OTHER

from jspec.text.parsers import document, formats, registry
from jspec.text.parsers.formats.thinking import GEMMA, MISTRAL_THINK, SEED, THINK, THINK_IF_OPENED
from jspec.text.parsers.parser import make_parser
from jspec.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, detect

THINKS = "{% if '</think>' in content %}{{ '<think>' }}"
# What is telling in public chat templates, and the formats of the models.
TEMPLATES = {
    "Qwen2.5": ('<|im_start|>..<tool_call>\\n{"name": <function-name>', ("hermes", None)),
    "Qwen3": (THINKS + '<tool_call>\\n{"name": <function-name>', ("hermes", "qwen3")),
    "Qwen3-Coder": ("<tool_call>\\n<function=example_function_name>", ("qwen3_coder", None)),
    "Qwen3.5": (THINKS + "<tool_call>\\n<function=example_function_name>", ("qwen3_coder", "qwen3")),
    "GLM-4.6": (THINKS + "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", ("glm45", "glm45")),
    "Kimi-K2": ("<|tool_calls_section_begin|>..<|tool_call_begin|>", ("kimi_k2", None)),
    "Kimi-K2-Thinking": ("<think></think>..<|tool_calls_section_begin|>..<|tool_call_begin|>", ("kimi_k2", "kimi_k2")),
    "MiniMax-M2": (THINKS + "{%- set begin = '<minimax:tool_call>' -%}", ("minimax_m2", "minimax_m2")),
    "Seed-OSS": ("'<seed:think>'..'<seed:tool_call>'..<function=example>", ("seed_oss", "seed_oss")),
    "DeepSeek-V3-0324": ("<｜tool▁call▁begin｜>' + tool['type'] + '..```json", ("deepseek_v3", None)),
    "DeepSeek-R1": (THINKS + "<｜tool▁call▁begin｜>' + tool['type'] + '..```json", ("deepseek_v3", "deepseek_r1")),
    "DeepSeek-V3.1": (THINKS + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool", ("deepseek_v31", "deepseek_v3")),
    "DeepSeek-V3.2": (THINKS + "{%- set dsml_token = '｜DSML｜' -%}", ("deepseek_v32", "deepseek_v3")),
    "Mistral-Small": ("[AVAILABLE_TOOLS]..[TOOL_CALLS]", ("mistral", None)),
    "Magistral": ("[THINK]..[/THINK]..[TOOL_CALLS]", ("mistral", "mistral")),
    "Gemma-4": ("<|channel>thought\\n<channel|>..<|tool_call>call:", ("gemma4", "gemma4")),
    "Gemma-3": ("<start_of_turn>model", (None, None)),
    "Llama-3.1": (
        'Environment: ipython..<|python_tag|>.."parameters": dictionary of argument name',
        ("llama3_json", None),
    ),
    "Llama-3.2": (
        '{"name": function name, "parameters": dictionary of argument name and its value}',
        ("llama3_json", None),
    ),
    "Llama-4": (
        "<|python_start|>..<|python_end|>..[func_name1(params_name1=params_value1)]",
        ("llama4_pythonic", None),
    ),
    "Olmo-3": ("<|im_start|>..<function_calls>..</function_calls>", ("olmo3", None)),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", ("openai", "openai_gptoss")),
    "DeepSeek-R1-Zero": (THINKS, (None, "deepseek_r1")),
    "none": ("", (None, None)),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_has_its_formats(name):
    template, expected = TEMPLATES[name]
    assert detect(template) == expected
    assert detect(template, "GptOssForCausalLM") == ("openai", "openai_gptoss")


def test_every_format_that_is_found_has_a_name():
    assert {tool for _, tool, _ in registry.SIGNS} <= set(TOOL_FORMATS)
    assert {reasoning for _, _, reasoning in registry.SIGNS} - {None} <= set(REASONING_FORMATS)
    assert set(registry.STARTS) <= set(REASONING_FORMATS)


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(ValueError, match="tool_call_parser='hermes3': expected one of hermes, "):
        make_parser("hermes3", None)
    with pytest.raises(ValueError, match="reasoning_parser='qwen4': expected one of qwen3, "):
        make_parser(None, "qwen4")


def test_every_tool_format_has_transcripts():
    read = {id(TOOL_FORMATS[row.tool]) for row in [*JSON, *OTHER] if row.tool}
    assert read == {id(form) for form in TOOL_FORMATS.values()}


@pytest.mark.parametrize(
    ("form", "prompt", "expected"),
    [
        (THINK, "", True),
        (THINK, "<|im_start|>assistant\n", True),
        (THINK, "<|im_start|>assistant\n<think>\n", True),
        (THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        (THINK, "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nThe answer", False),
        (THINK, "<think></think><|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n", True),
        (THINK, "Human: </think>\nAssistant:", True),
        (THINK, "Assistant: <think>\n\n</think>\n", False),
        (THINK, "]~b]ai\n<think>\n", True),
        (THINK_IF_OPENED, "", False),
        (THINK_IF_OPENED, "<｜User｜>a <think><｜Assistant｜></think>", False),
        (
            THINK_IF_OPENED,
            "<｜Assistant｜><think>a</think>..<｜tool▁output▁begin｜><think><｜tool▁output▁end｜>",
            False,
        ),
        (THINK_IF_OPENED, "<｜Assistant｜></think>..<function_results>..</function_results>\n\n<think>", True),
        (SEED, "<seed:bos>assistant\n", True),
        (SEED, "<seed:bos>assistant\n<seed:think></seed:think>", False),
        (GEMMA, "<|turn>user\n<|channel>thought<turn|>\n<|turn>model\n", False),
        (GEMMA, "<|turn>model\n<|channel>thought\n", True),
        (GEMMA, "<|turn>model\n<|channel>thought\n<channel|>", False),
        (GEMMA, "<|turn>model\n..<tool_response|>", False),
        (MISTRAL_THINK, "[INST]a [THINK][/INST]", False),
        (MISTRAL_THINK, "[INST]a[/INST][THINK]", True),
    ],
)
def test_the_end_of_a_prompt_says_whether_reasoning_is_open(form, prompt, expected):
    assert form.opened_by(prompt) == expected


def test_no_marker_begins_with_another():
    """What a search finds does not depend on how much of the text has come."""
    for form in TOOL_FORMATS.values():
        markers = {*form.markers, *form.begins, *form.plain_begins, *form.line_begins}
        assert not [(a, b) for a in markers for b in markers if a != b and a in b], form


def test_nothing_there_imports_what_is_heavy():
    imported = {
        name.name if isinstance(node, ast.Import) else str(node.module)
        for module in (document, registry, formats)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert not {name.partition(".")[0] for name in imported} & {"jax", "numpy", "pydantic", "transformers"}
