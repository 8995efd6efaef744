"""Paths that are answered without a key, or while the server ends."""

OPEN = ("/health", "/")  # answered without a key; a browser that is given an address alone has none to send
WHILE_DRAINING = ("/health", "/metrics")
