"""Calls of Seed-OSS: those of Qwen3-Coder within ``<seed:tool_call>``."""

import dataclasses

from jspec.text.parsers.formats.qwen3_coder import QWEN3_CODER

SEED_OSS = dataclasses.replace(QWEN3_CODER, opens=("<seed:tool_call>",), closes=("</seed:tool_call>",))
