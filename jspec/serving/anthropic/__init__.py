"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``, over the chats of ``jspec.serving.openai``.

protocol.py      request bodies
conversation.py  from these to messages and tools of a chat
messages.py      the two endpoints
response.py      a message, complete or as events
"""
