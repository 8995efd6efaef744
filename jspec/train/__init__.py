"""Training of draft heads, as the command ``jspec train`` runs it."""
