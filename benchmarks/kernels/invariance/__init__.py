"""Do the bits of a token's results depend on how many tokens a call has? See ``__main__.py``."""
