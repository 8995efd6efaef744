"""The formats of tool calls and reasoning, one file for each family. Nothing is imported here.

thinking.py       reasoning, of all families but gpt-oss
hermes.py         Hermes, Qwen 2.5, Qwen 3
qwen3_coder.py    Qwen3-Coder, Qwen 3.5, MiMo
seed_oss.py       Seed-OSS
minimax_m2.py     MiniMax M2
deepseek_v32.py   DeepSeek V3.2 and V4
tagged.py         what the last four share: parameters as raw text between tags
glm45.py          GLM 4.5 to 5
deepseek_v3.py    DeepSeek V3 and R1
deepseek_v31.py   DeepSeek V3.1
kimi_k2.py        Kimi K2
sections.py       what the last three share: a section with headers and JSON
llama3_json.py    Llama 3 and 4, as JSON
json_fence.py     Qwen 2.5 Coder, as JSON in a fence
mistral.py        Mistral, before version 11 of its tokenizer and since
gemma4.py         Gemma 4
pythonic.py       Llama 3.2, Llama 4 and Olmo 3, as Python calls
python_values.py  Python's literals
openai.py         gpt-oss
"""
