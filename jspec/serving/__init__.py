"""Concurrent serving: ``AsyncEngine`` for asyncio programs, and the HTTP server.

async_engine.py   ``AsyncEngine``
openai/           the HTTP server over it, ``jspec serve``
supervisor/       the HTTP server where several processes run the target
"""
