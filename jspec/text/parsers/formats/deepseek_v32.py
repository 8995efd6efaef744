"""Calls of DeepSeek V3.2 and V4, in which the model says of each value whether it is a string or JSON.

``<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>..``.
V4 has ``tool_calls`` for ``function_calls``, and sometimes writes ``toolcalls`` or ``tool``.
"""

from jspec.text.parsers.formats.tagged import TaggedCalls

AROUND = ("function_calls", "tool_calls", "toolcalls", "tool")

DEEPSEEK_V32 = TaggedCalls(
    opens=tuple(f"<｜DSML｜{name}>" for name in AROUND),
    closes=tuple(f"</｜DSML｜{name}>" for name in AROUND),
    call="<｜DSML｜invoke name=",
    call_end="</｜DSML｜invoke>",
    parameter="<｜DSML｜parameter name=",
    parameter_end="</｜DSML｜parameter>",
    quoted=True,
    typed=True,
    newlines=False,
)
