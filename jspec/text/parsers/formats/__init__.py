"""The formats of tool calls and reasoning, one file for each family. Nothing is imported here.

thinking.py       reasoning, of all families but gpt-oss
json_objects.py   Hermes, Qwen 2.5, Qwen 3, Llama 3 and 4, Qwen 2.5 Coder: JSON objects
tagged.py         Qwen3-Coder, Qwen 3.5, MiMo, Seed-OSS, MiniMax M2, DeepSeek V3.2 and V4: raw text between tags
glm45.py          GLM 4.5 to 5
sections.py       DeepSeek V3, R1 and V3.1, Kimi K2: a section with headers and JSON
mistral.py        Mistral, before version 11 of its tokenizer and since
gemma4.py         Gemma 4
pythonic.py       Llama 3.2, Llama 4 and Olmo 3, as Python calls
python_values.py  Python's literals
openai.py         gpt-oss
"""
