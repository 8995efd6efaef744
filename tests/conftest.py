"""Strictness for every test: an implicit change of rank is an error, as every warning is (pyproject.toml)."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
