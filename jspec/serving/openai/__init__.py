"""``jspec serve``: an HTTP server that speaks OpenAI's protocol, with vLLM's additions to it.

Only ``command`` and ``limits`` may be imported without the packages of ``jspec[serve]``.

command.py          options of ``jspec serve``
server_settings.py  settings of the server from these options
standard_streams.py  standard error and output that may be full or gone
served_model.py     the model and its service from these options
http_server.py      listening socket, uvicorn server and signals
connection.py       HTTP connections with limits: time of a head, size of chunks, their number
header_checks.py    hosts, framing and ids of requests
loop_monitor.py     the longest pause of the event loop
lifecycle.py        start, serving and graceful shutdown
app.py              routes
paths.py            paths without an API key, or open during shutdown
middleware.py       authentication, draining and error responses
auth.py             API keys
errors.py           error responses in OpenAI's format
limits.py           limits of a request
list_limits.py      limits of lists and objects in a request
request_body.py     reads bodies within limits of size, time and bytes in all
json_body.py        parses a JSON body strictly
protocol.py         fields of requests
response_format.py  structured outputs of a request
sampling.py         sampling parameters of a request
service.py          the served model, its engine and the server's settings
serving_base.py     what completions and chats share: settings, engine requests, response
completions.py      ``/v1/completions``
chat.py             ``/v1/chat/completions``
tool_choice.py      which tools a chat may, must or must not call
chat_prompt.py      the prompt of a chat
chat_turn.py        a turn of a chat, for all endpoints that have chats
chat_output.py      these as a message of ``/v1/chat/completions``, or as its deltas
turn_response.py    these for the endpoints with other forms
tokenize.py         ``/tokenize`` and ``/detokenize``
responses.py        responses of completions and chats, complete and streamed
streaming.py        server-sent events, cancelled when the client disconnects
logprobs.py         log-probabilities in OpenAI's formats
metrics.py          ``/metrics``
page.py             the page at ``/``, page.html
"""
