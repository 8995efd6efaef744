"""OpenAI's ``/v1/responses``, over the chats of ``jspec.serving.openai``.

protocol.py      request bodies
tools.py         tools as functions of a chat, and back to their own form
conversation.py  from items to messages of a chat
store.py         the newest responses, for ``previous_response_id``
responses.py     the endpoints
response.py      a response, complete or as events
"""
