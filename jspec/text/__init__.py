"""Text to tokens and back. Nothing is imported here, to keep the process that compiles grammars small.

prompts.py         the forms of prompts: text, token ids, dictionaries
files.py           prompts and texts in a user's file
chat_messages.py   chat messages, checked
chat_parts.py      messages as lists of parts, for templates that write no other
chat_roles.py      system and developer messages in the form that a chat template writes
deadline.py        ends Python code that takes too much CPU time
chat_template.py   from chat messages to the tokens of a prompt
detokenizer.py     encoding, and the incremental decoding of a completion
stop_strings.py    the streamed text of a request, and its stop strings
token_spans.py     attributes spans of text to accepted drafts or to the target
token_bytes.py     the bytes of single tokens
grammar/           grammars for structured outputs
thinking.py        where the marker that ends reasoning has to come
parsers/           reasoning, content and tool calls in the text of a completion
"""
