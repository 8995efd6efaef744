"""Concurrent serving: ``AsyncEngine`` for asyncio programs, and the HTTP server.

Each folder imports only those above it.

async_engine.py   ``AsyncEngine``
http/             HTTP without a model: server, connections, headers, bodies, streams, API keys, limits and errors
generation/       from the fields of a request to the engine's requests, and back to a response; no endpoint
openai/           OpenAI's completions and chats, with vLLM's additions
anthropic/        Anthropic's ``/v1/messages``
responses_api/    OpenAI's ``/v1/responses``
supervisor/       the process with the public address where several processes run the target; it needs no JAX
server/           ``jspec serve``: options, the model, routes, start and shutdown
worker/           one of these processes
"""
