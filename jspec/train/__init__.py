"""Training of draft heads: the command ``jspec train`` and what it is made of."""
