"""How many drafts of the shipped family are accepted."""
