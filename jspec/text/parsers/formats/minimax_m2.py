"""Calls of MiniMax M2: ``<invoke name="f"><parameter name="k">v</parameter></invoke>`` within ``<minimax:tool_call>``."""

from jspec.text.parsers.formats.tagged import TaggedCalls

MINIMAX_M2 = TaggedCalls(
    opens=("<minimax:tool_call>",),
    closes=("</minimax:tool_call>",),
    call="<invoke name=",
    call_end="</invoke>",
    parameter="<parameter name=",
    parameter_end="</parameter>",
    quoted=True,
)
