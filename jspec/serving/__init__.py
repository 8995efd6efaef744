"""A model for many callers at once: ``AsyncEngine`` serves the requests of asyncio programs."""
