"""OpenAI's ``/v1/responses``, as chats.

protocol.py      request bodies
tools.py         tools as functions of a chat, and back to their own form
conversation.py  from items to messages of a chat
endpoints.py     the endpoints
response.py      a response, complete or as events
"""
