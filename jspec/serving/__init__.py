"""Concurrent serving: ``AsyncEngine`` for asyncio programs, and the HTTP server.

async_engine.py   ``AsyncEngine``
openai/           the HTTP server over it, ``jspec serve``, and OpenAI's endpoints
responses_api/    OpenAI's ``/v1/responses``
anthropic/        Anthropic's ``/v1/messages``
supervisor/       the HTTP server where several processes run the target
"""
