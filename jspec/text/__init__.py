"""Text on its way to tokens and back. Nothing is imported here: the process that tries grammars needs next to nothing.

prompts.py         what callers may pass as prompts
chat_messages.py   messages of a conversation, checked
chat_template.py   from messages to the tokens of a prompt
detokenizer.py     what jspec asks of a tokenizer, and text that grows with its tokens
stop_strings.py    text that can be shown already, and the stop string that ends it
token_spans.py     which spans of a completion were accepted drafts, and which are the target's own
grammar/           grammars that restrict completions
"""
