"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``, as chats.

protocol.py      request bodies
conversation.py  from these to messages and tools of a chat
endpoints.py     the two endpoints
response.py      a message, complete or as events
"""
