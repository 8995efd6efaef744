"""HTTP without a model: what every server of jspec has in common, for any ASGI application.

Only ``limits`` may be imported without the packages of ``jspec[serve]``.

settings.py         settings of a server from the options of ``jspec serve``
standard_streams.py  standard error and output that may be full or gone
server.py           listening socket, uvicorn server and signals
connection.py       connections with limits: time of a head, size of chunks, their number
headers.py          hosts, framing and ids of requests
request_body.py     reads bodies within limits of size, time and bytes in all
streaming.py        server-sent events, cancelled when the client disconnects
auth.py             API keys, and the paths that need none
limits.py           limits of a request
errors.py           error responses in OpenAI's and in Anthropic's format
loop_monitor.py     the longest pause of the event loop
"""
