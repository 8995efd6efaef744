"""An engine and its server under requests."""
