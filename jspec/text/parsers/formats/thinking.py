"""How families of models mark reasoning."""

import dataclasses

from jspec.text.parsers.tool_format import ReasoningFormat

# What templates write before the model's turn: those of Qwen, Kimi, GLM, DeepSeek, MiniMax and Llama. DeepSeek's and
# Gemma's have nothing between the result of a tool and the model's text.
TURNS = ("<|im_start|>assistant", "<|im_assistant|>assistant<|im_middle|>", "<|assistant|>", "<｜Assistant｜>")
TURNS += ("<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>", "</function_results>", "]~b]ai", "<|end_header_id|>")

THINK = ReasoningFormat(turns=TURNS)
THINK_IF_OPENED = dataclasses.replace(THINK, open=False)  # DeepSeek V3.1, whose template opens or closes it
SEED = ReasoningFormat("<seed:think>", "</seed:think>", turns=("<seed:bos>assistant",))
MISTRAL_THINK = ReasoningFormat("[THINK]", "[/THINK]", open=False, turns=("[/INST]", "[/TOOL_RESULTS]"))
GEMMA = ReasoningFormat(
    "<|channel>thought\n",
    "<channel|>",
    open=False,
    markers=("<|channel>", "<channel|>"),
    turns=("<|turn>model", "<tool_response|>"),
)
