"""What the host does: grammars, loading, and what a GPU holds."""
