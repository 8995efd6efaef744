"""From the fields of a request to the engine's requests, and back to a response: what all endpoints have in common.

protocol.py         fields of requests
list_limits.py      limits of lists and objects in a request
json_body.py        parses a JSON body strictly
sampling.py         sampling parameters and structured outputs of a request
service.py          the served model, its engine and the server's settings
response_store.py   the newest responses of ``/v1/responses``
tool_choice.py      which tools a chat may, must or must not call
chat_prompt.py      the prompt of a chat
chat_turn.py        a turn of a chat: its prompt, its form and the parsers of its texts
respond.py          settings of a request, the engine's requests, and the response
response.py         the base of all responses, complete or as events
block_response.py   a response of blocks: messages and responses
"""
