"""Calls of DeepSeek V3.1: ``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{..}<｜tool▁call▁end｜>``."""

from jspec.text.parsers.formats.sections import SectionCalls

DEEPSEEK_V31 = SectionCalls(
    opens=("<｜tool▁calls▁begin｜>",),
    closes=("<｜tool▁calls▁end｜>",),
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
