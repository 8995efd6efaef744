"""The drafters: ways of proposing tokens, one file for each."""
