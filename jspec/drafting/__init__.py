"""Ways of proposing tokens, one file each."""
