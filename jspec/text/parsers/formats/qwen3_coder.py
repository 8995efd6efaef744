"""Calls of Qwen3-Coder, Qwen 3.5 and MiMo: ``<tool_call><function=f><parameter=k>v</parameter></function></tool_call>``.

Qwen3-Coder sometimes leaves out ``<tool_call>``.
"""

from jspec.text.parsers.formats.tagged import TaggedCalls

QWEN3_CODER = TaggedCalls(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    call="<function=",
    call_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    bare=True,
)
