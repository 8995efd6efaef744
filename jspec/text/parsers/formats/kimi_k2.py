"""Calls of Kimi K2, whose ids are ``functions.NAME:N``. It sometimes writes the section's markers in the singular."""

from jspec.text.parsers.formats.sections import SectionCalls

KIMI_K2 = SectionCalls(
    opens=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    closes=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    numbered=True,
)
