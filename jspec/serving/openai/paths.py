"""Paths that need no API key, or that stay open during shutdown."""

OPEN = ("/health", "/ping", "/")  # need no key; a browser that opens the page has none to send
WHILE_DRAINING = ("/health", "/ping", "/metrics")
