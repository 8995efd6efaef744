"""OpenAI's completions and chats, with vLLM's additions to them.

choice_response.py  a response of choices, complete or as chunks
completions.py      ``/v1/completions``
chat.py             ``/v1/chat/completions``
generate.py         ``/inference/v1/generate``
logprobs.py         log-probabilities in OpenAI's formats
tokenize.py         ``/tokenize`` and ``/detokenize``
"""
