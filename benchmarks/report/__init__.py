"""Results as files, and the tables in README.md and docs/ that are written from them."""
