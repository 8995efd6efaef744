"""A model for many callers at once: ``AsyncEngine`` serves the requests of asyncio programs.

async_engine.py   ``AsyncEngine``
openai/           the HTTP server over it, ``jspec serve``
supervisor/       the HTTP process where several processes run the target
"""
