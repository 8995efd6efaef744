"""Calls of DeepSeek V3 and R1: those of V3.1 with ``function`` in place of the name, which has a line of its own, and with
the arguments in a fence."""

import dataclasses

from jspec.text.parsers.formats.deepseek_v31 import DEEPSEEK_V31

DEEPSEEK_V3 = dataclasses.replace(DEEPSEEK_V31, fenced=True)
